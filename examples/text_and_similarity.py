# %% [markdown]
# # CLIP and similarity
#
# Models of images and texts, such as CLIP and SigLIP, compare an image with any sentence. Which part of the image
# makes a sentence fit? And what makes two images alike? `scenes-text` is a small model of this kind that comes with
# vitrail and reads 23 words: colours, shapes, sizes, places. For CLIP itself, the first line becomes
# `vitrail.load("hf:openai/clip-vit-base-patch32", prompts=["a cat", "a dog"])`.

# %%
from PIL import Image

import vitrail
from vitrail.data import CaptionedScenes
from vitrail.show.figure import contact_sheet

model = vitrail.load("scenes-text")
scene = CaptionedScenes(1, seed=8, objects=3, shared="colour")[0]
texts = [item.caption for item in scene.objects]
print(texts)

# %% [markdown]
# ## Why this text?
#
# Two of the three objects share a colour, two a shape. The map of a text ought to lie on the object that it
# describes.

# %%
picture = Image.fromarray(scene.image)
answers = [vitrail.explain(model, picture, target=text) for text in texts]
contact_sheet([(picture, "the picture"), *((ex.overlay(), ex.title) for ex in answers)], columns=4)

# %% [markdown]
# A text that was not among the classes becomes one. This one is true of two objects:

# %%
vitrail.explain(model, picture, target=f"a {scene.objects[0].colour} object")

# %% [markdown]
# ## Why this text rather than that?
#
# Red speaks for the first text, blue for the second.

# %%
vitrail.explain(model, picture, target=texts[0], against=texts[1])

# %% [markdown]
# ## What makes two images alike?
#
# Another picture, with one object of the same colour and shape:

# %%
other_scene = next(
    candidate
    for candidate in CaptionedScenes(100, seed=9, objects=2)
    if texts[1] in [item.caption for item in candidate.objects]
)
other = Image.fromarray(other_scene.image)
print([item.caption for item in other_scene.objects])

# %% [markdown]
# `vitrail.similar` explains the cosine of two embeddings from either side. With `decompx` it splits *exactly* into
# shares of pairs of patches, one of each image; lines connect the largest.

# %%
alike = vitrail.similar(model, picture, other, "decompx")
alike.picture()

# %%
ex = alike.first
print(f"cosine {alike.score:.3f} = pairs {ex.extras['score_pairs']:.3f} + rest {ex.extras['score_pairs_rest']:.3f}")
print(f"pairs: {tuple(ex.pairs.shape)}")
for first, second, share in alike.links(3):
    print(f"patch {first} with patch {second}: {share:+.3f}")

# %% [markdown]
# The rest is what biases and prefix tokens hold.
#
# Next: [which method](which_method.ipynb).
