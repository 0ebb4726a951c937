# %% [markdown]
# # First steps
#
# Why does a Vision Transformer see a cat here? vitrail answers with a map of the patches that speak for the class,
# and says how far to trust it. Everything below runs offline with `photo`, a small model that comes with the package.

# %%
import vitrail
from vitrail.samples import open_sample

model = vitrail.load()  # or "vit_base_patch16_224", "hf:ORG/NAME", …
ex = vitrail.explain(model, open_sample("cat.jpg"))
ex

# %% [markdown]
# Red patches are evidence for the class, blue ones against it; the sides are hatched because the model only sees the
# central square. The map is a tensor with one number for each patch, and `ex.top` has the most likely classes.

# %%
print(f"map {tuple(ex.map.shape)}, from {ex.map.min():.2f} to {ex.map.max():.2f}")
for _, name, probability in ex.top:
    print(f"{probability:6.1%}  {name}")

# %% [markdown]
# ## Can I trust it?
#
# A heatmap without a number is decoration. `ex.trust()` asks the network itself: it removes the top patches and
# compares with random ones, then checks whether the map predicts what happens when only some patches are left.

# %%
trust = ex.trust()
print(ex.trust_line)

# %% [markdown]
# ## Another class, and one class rather than another
#
# With two things in a picture, a good explanation moves when the question does.

# %%
from PIL import Image

from vitrail.show.figure import side_by_side

both = Image.new("RGB", (480, 480))
both.paste(open_sample("cat.jpg").crop((0, 40, 448, 264)).resize((480, 240)), (0, 0))
both.paste(open_sample("coffee.jpg").crop((0, 40, 448, 264)).resize((480, 240)), (0, 240))

cat = vitrail.explain(model, both, target="tabby")
cup = vitrail.explain(model, both, target="espresso")
contrast = vitrail.explain(model, both, target="espresso", against="tabby")
side_by_side([question.picture() for question in (cat, cup, contrast)])

# %% [markdown]
# The third map explains the *difference* of two scores: red speaks for the espresso, blue for the cat.
#
# ## Turn the knobs
#
# With ipywidgets (`pip install "vitrail[notebook]"`), `ex.widget()` has controls for the class, the opacity, the
# share of the patches that is shown, and the sign. They need a running kernel: elsewhere you see a picture.

# %%
cup.widget()

# %% [markdown]
# ## Keep it
#
# `save` writes the picture and a JSON file with every number. `vitrail.open` reads them, and checks that neither the
# model nor the image has changed.

# %%
both.save("both.png")
vitrail.explain(model, "both.png", target="espresso").save("why.png")
again = vitrail.open("why.json")
print(again.title, again.method)

# %% [markdown]
# Next: [my fine-tuned model](my_model.ipynb), [which method](which_method.ipynb).
