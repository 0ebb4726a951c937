# %% [markdown]
# # Which method?
#
# Methods disagree. Here six of them are looked at, then measured: on the model you have, with the images you have.

# %%
import vitrail
from vitrail.samples import open_sample
from vitrail.show.figure import contact_sheet

methods = ["decompx.skipplus", "gen_att", "grad_cam", "rollout", "tis(masks=128)", "random"]
model = vitrail.load("scenes")
picture = open_sample("star-and-heart.png")

# %% [markdown]
# ## Look
#
# The picture shows a star and a heart. Ask about the star, then about the heart: a map that stays the same does not
# depend on the class, and cannot say why it is a star *and not a heart*.

# %%
from vitrail.calls import split_call


def sheet(target):
    cells = [(picture, f"why {target}?")]
    for call in methods:
        name, params = split_call(call)
        ex = vitrail.explain(model, picture, name, target, **params)
        cells.append((ex.overlay(), call))
    return contact_sheet(cells, columns=4)


sheet("star")

# %%
sheet("heart")

# %% [markdown]
# ## Measure
#
# *Insertion* shows the model the most important pixels first: its probability should rise quickly. *Deletion* removes
# them first: it should fall quickly. The *pointing game* asks whether the peak lies on the object of the class. The
# control `random` says what a number is worth. Eight examples and coarse curves are few; they take seconds.

# %%
from vitrail.metrics import summarise

rows = vitrail.evaluate(
    model,
    "scenes:6",
    methods,
    ["insertion(steps=16)", "deletion(steps=16)", "pointing_game"],
    target="label",
    images=8,
)
summary = summarise(rows)
numbers = summary[["mean", "low", "high"]].to_numpy()
summary["value"] = [f"{mean:.2f} [{low:.2f}, {high:.2f}]" for mean, low, high in numbers]
summary.pivot(index="method", columns="metric", values="value").loc[[split_call(call)[0] for call in methods]]

# %% [markdown]
# ## Read it
#
# - Trust the order of two methods only if their intervals are apart (in brackets): measure more images.
# - A high insertion is worth little if `random` is near it.
# - `rollout` finds objects, but the same for every class: its peak is often on the wrong one of two.
#
# `vitrail compare photo.jpg` draws such a sheet for any photograph, and the
# [leaderboard](https://github.com/vitrail/vitrail/blob/main/docs/leaderboard.md) has every method on several models,
# with costs. Its best method, `posterior`, takes more than a hundred times as long as the default.
#
# Next: [a new method](new_method.ipynb).
