# %% [markdown]
# # A new method, to the leaderboard
#
# A method is a function from a batch of images to a batch of maps. Register it, and it works everywhere a built-in
# method does: `explain`, `evaluate`, the command line, the web page and the benchmark.
#
# ## Ten lines
#
# How much does the class lose when a patch and its neighbours leave the sequence? `model.encode(tokens, keep)` runs
# the network on some of the patches.

# %%
import torch

import vitrail


@vitrail.method("neighbourhood", cost=(65, 0), signed=True)
def neighbourhood(model, images, target):
    """Drop of the class score when a 3 × 3 neighbourhood of patches is removed."""
    tokens, (rows, columns) = model.embed(images), model.grid
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")

    def score(keep=None):
        return model.score(model.encode(tokens, keep), target, None, "logit")

    with torch.no_grad():
        away = [((row - i).abs() > 1) | ((column - j).abs() > 1) for i in range(rows) for j in range(columns)]
        drops = [score() - score(far.flatten().nonzero()[:, 0]) for far in away]
    return torch.stack(drops, dim=1).unflatten(1, model.grid)


# %%
from vitrail.data import open_data

scene = open_data("scenes:1?objects=2")[0]
vitrail.explain("scenes", scene.image, "neighbourhood", target=scene.label)

# %% [markdown]
# ## Is it any good?
#
# Beside the default and a random map, on four examples:

# %%
from vitrail.metrics import summarise

metrics = ["insertion_minus_deletion(steps=56)", "pointing_game"]
rows = vitrail.evaluate(
    "scenes", "scenes:120", ["neighbourhood", "decompx.skipplus", "random"], metrics, target="label", images=4
)
summarise(rows)[["method", "metric", "mean", "low", "high", "n"]].round(2)

# %% [markdown]
# ## Where would it stand?
#
# The leaderboard comes with the package. Its column `scenes` has the same model, metric and kind of images, but 64 of
# them: four examples give a first idea, no rank.

# %%
from vitrail.report.leaderboard import shipped_table

board = shipped_table()
board = board[(board["pair"] == "scenes") & (board["metric"] == metrics[0])]
mine = rows[(rows["method"] == "neighbourhood") & (rows["metric"] == metrics[0])]["value"].mean()
ahead = int((board["mean"] > mine).sum())
print(f"{mine:.2f} on four examples; {ahead} of the {len(board)} methods on the leaderboard have more")

# %% [markdown]
# For a rank, save the method as `mine.py` and run
#
# ```sh
# vitrail bench leaderboard --plugin mine.py --out board
# ```
#
# which measures it beside the references, on every pair of a model and images that is there, survives an
# interruption, and writes the page with your method in it. `vitrail bench --data scenes --methods
# neighbourhood,random --plugin mine.py` does the same for any data.
