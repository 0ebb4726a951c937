# %% [markdown]
# # My fine-tuned model
#
# You have a Vision Transformer from a training loop of your own. Here one is fine-tuned in a few seconds, on the
# question *one object or two?*, and explained. No layer is chosen, no reshape function written.
#
# The pictures are scenes that vitrail draws: one or two of ten shapes, with clutter. The backbone knows the shapes
# (it is the embedded model `scenes`, a `timm` ViT), but it was never asked to count.

# %%
import copy

import torch
from torch.nn.functional import avg_pool2d, cross_entropy

import vitrail
from vitrail.data import Scenes

torch.manual_seed(0)
names = ["one object", "two objects"]
pretrained = vitrail.load("scenes")


def batch(scenes):
    images = torch.stack([torch.from_numpy(scene.image).permute(2, 0, 1) / 127.5 - 1 for scene in scenes])
    return images, torch.tensor([len(scene.objects) - 1 for scene in scenes])


module = copy.deepcopy(pretrained.module)  # yours: timm.create_model("vit_base_patch16_224", pretrained=True)
module.reset_classifier(num_classes=2)

# %% [markdown]
# ## An ordinary training loop
#
# A new head, and the last two blocks; the rest stays as it is.

# %%
module.requires_grad_(False)
trained = torch.nn.ModuleList([*module.blocks[-2:], module.norm, module.head]).requires_grad_(True)
optimiser = torch.optim.AdamW(trained.parameters(), lr=1e-3)
images, labels = batch(Scenes(960, seed=10))
module.train()
for step in range(30):
    rows = slice(32 * step, 32 * (step + 1))
    loss = cross_entropy(module(images[rows]), labels[rows])
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    if step % 5 == 4:
        print(f"step {step + 1}  loss {loss.item():.3f}")
module.eval()

held_out = Scenes(200, seed=11)
images, labels = batch(held_out)
with torch.no_grad():
    predicted = module(images).argmax(1)
print(f"accuracy on 200 other scenes: {(predicted == labels).float().mean():.1%}")

# %% [markdown]
# ## Explain it
#
# `wrap` looks at the module without changing it, and compares its own logits with the module's. The names of the
# classes and the normalisation are yours.

# %%
from vitrail.show.figure import side_by_side

model = vitrail.wrap(module, labels=names, mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=1.0)
pair = next(i for i in range(200) if labels[i] == predicted[i] == 1)
single = next(i for i in range(200) if labels[i] == predicted[i] == 0)
right = vitrail.explain(model, [held_out[pair].image, held_out[single].image])
side_by_side([ex.picture() for ex in right])

# %% [markdown]
# Does the model count objects or clutter? The masks of the scenes are known, so this can be measured: the share of
# the positive evidence for *two objects* that lies on an object, and the share of the picture that objects cover.

# %%
pairs = [scene for scene in held_out if len(scene.objects) == 2][:16]
answers = vitrail.explain(model, [scene.image for scene in pairs], target="two objects")
masks = torch.tensor([(scene.objects[0].mask | scene.objects[1].mask).tolist() for scene in pairs]).float()
covered = avg_pool2d(masks, 8)  # of each patch, 8 × 8 pixels
evidence = torch.stack([ex.map.clamp(min=0) for ex in answers])
share = (evidence * covered).sum((1, 2)) / evidence.sum((1, 2))
print(f"on objects: {share.mean():.0%} of the evidence, {covered.mean():.0%} of the picture")

# %% [markdown]
# ## Where it is wrong
#
# The most useful question about an error: why the predicted class *rather than* the true one?

# %%
wrong = [i for i in range(200) if labels[i] != predicted[i]][:3]
questions = [
    vitrail.explain(model, held_out[i].image, target=names[predicted[i]], against=names[labels[i]]) for i in wrong
]
side_by_side([ex.picture() for ex in questions])

# %% [markdown]
# From the command line, with weights in a file: `vitrail explain photos/ --model deit_tiny_patch16_224 --checkpoint
# w.safetensors --labels labels.txt`.
#
# Next: [audit a data set](audit.ipynb).
