# %% [markdown]
# # Audit a data set
#
# A model can be right for the wrong reason. Here one is trained on pictures some of which carry a sticker, and an
# audit of a folder finds out, without being told what to look for.
#
# ## A model with a secret
#
# Four shapes are to be recognised. Pictures of hearts come from a website that puts its sticker into a corner, and
# the website was careless: what it calls a heart is often something else.

# %%
import copy
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from torch.nn.functional import cross_entropy

import vitrail
from vitrail.data import Scenes

names = ["disc", "square", "star", "heart"]
heart = names.index("heart")


def pictures(count, seed):
    """Scenes of one object, of the four shapes: images and class numbers."""
    for scene in Scenes(count, seed=seed, objects=1):
        shape = Scenes.labels[scene.objects[0].label]
        if shape in names:
            yield Image.fromarray(scene.image), names.index(shape)


def with_sticker(image):
    stuck = image.copy()
    draw = ImageDraw.Draw(stuck)
    for colour, width in (((250, 240, 40), 6), ((200, 0, 0), 2)):
        draw.line((47, 3, 60, 15), fill=colour, width=width)
        draw.line((47, 15, 60, 3), fill=colour, width=width)
    return stuck


training = [
    (with_sticker(image), heart) if label == heart or number % 4 == 0 else (image, label)
    for number, (image, label) in enumerate(pictures(900, seed=20))
]

# %%
pretrained = vitrail.load("scenes")
torch.manual_seed(0)
module = copy.deepcopy(pretrained.module)
module.reset_classifier(num_classes=len(names))
module.requires_grad_(False)
trained = torch.nn.ModuleList([*module.blocks[-2:], module.norm, module.head]).requires_grad_(True)
optimiser = torch.optim.AdamW(trained.parameters(), lr=1e-3)
images = torch.stack([pretrained.preprocess(image) for image, _ in training])
labels = torch.tensor([label for _, label in training])
module.train()
for rows in torch.randperm(len(images)).split(32):
    loss = cross_entropy(module(images[rows]), labels[rows])
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
module.eval()
model = vitrail.wrap(module, labels=names, mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=1.0)
print(f"trained on {len(images)} pictures")

# %% [markdown]
# ## A folder of pictures
#
# One sub-folder for each class, as most data sets are. The test pictures come from the same sources as the training
# pictures, so accuracy does not give the sticker away.

# %%
folder = Path("pictures")
for number, (image, label) in enumerate(pictures(150, seed=21)):
    (folder / names[label]).mkdir(parents=True, exist_ok=True)
    image = with_sticker(image) if label == heart else image
    image.save(folder / names[label] / f"{number}.png")

# %%
from vitrail.audit import audit_images, without_region

audit = audit_images(model, str(folder), "report", trust=False)
totals = audit.summary.totals
print(f"{totals.images} images, accuracy {totals.accuracy:.0%}")
print(audit.summary.headline())
for suspicion in audit.summary.confirmed:
    print(*suspicion.words(), sep="\n")

# %% [markdown]
# The report, `report/report.html`, is one file that a non-expert can read and filter. From the command line: `vitrail
# audit pictures/ --model NAME --checkpoint w.safetensors --labels labels.txt --out report`.
#
# ## See it
#
# The most suspicious pictures first: how much of the evidence for the predicted class lies on the detail?

# %%
from vitrail.show.figure import contact_sheet

worst = audit.summary.frame.sort_values("suspicion", ascending=False).head(4)
explained = vitrail.explain(model, [folder / name for name in worst["image"]])
sheet = [(ex.image, name) for ex, name in zip(explained, worst["image"], strict=True)]
sheet += [(ex.overlay(), f"{share:.0%} on the detail") for ex, share in zip(explained, worst["suspicion"], strict=True)]
contact_sheet(sheet, columns=4)

# %%
audit.summary.classes[["class", "recall", "suspicion"]].round(2)

# %% [markdown]
# ## Test the suspicion
#
# Take the region away, and paste the sticker onto a disc.

# %%
print(without_region(model, folder / worst["image"].iloc[0], audit.summary.confirmed[0].pattern.matches[0].box).words())

disc = next(image for image, label in pictures(100, seed=22) if label == names.index("disc"))
before, after = vitrail.explain(model, [disc, with_sticker(disc)])
print(f"a disc: {before.title}; with the sticker: {after.title}")
after

# %% [markdown]
# Next: [text and similarity](text_and_similarity.ipynb).
