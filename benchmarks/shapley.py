"""How well maps agree with Shapley values of the patches, sampled by many permutations.

Run: python benchmarks/shapley.py [--model scenes] [--data scenes:50] [--images 50] [--permutations 32]
                                  [--methods "decompx.skipplus; vit_shapley"] [--batch 10] [--device auto]
Prints the correlation (Pearson's and Spearman's, mean over images) of each method's map, one value per patch, with
Shapley values of the predicted class. Those of two seeds are compared first: nothing agrees better with one of them
than they do with each other, but for their noise. 32 permutations of 256 patches are 8,160 scores.
"""

from __future__ import annotations

import argparse
from functools import partial
from statistics import fmean

import numpy as np
import torch
from scipy.stats import pearsonr, spearmanr
from torch import Tensor

import vitrail
from vitrail.calls import split_call
from vitrail.data.names import open_data
from vitrail.methods.registry import build_method
from vitrail.methods.vit_shapley import embedded_explainer
from vitrail.models.view import View

METHODS = "decompx.skipplus; full_grad_plus(rule=frozen); attn_lrp; lime; posterior(space=tokens); kernel_shap; tis"


def maps(view: View, images: Tensor, classes: Tensor, batch: int, call: str) -> Tensor:
    """(B, N): the values of the patches."""
    name, params = split_call(call)
    method = build_method(name, view, **params)
    parts = [method.attribute(*part) for part in zip(images.split(batch), classes.split(batch), strict=True)]
    return torch.cat(parts).flatten(1).cpu()


def agreement(values: Tensor, reference: Tensor) -> str:
    pairs = list(zip(np.asarray(values.double()), np.asarray(reference.double()), strict=True))
    pearson, spearman = (fmean(float(f(*pair).statistic) for pair in pairs) for f in (pearsonr, spearmanr))
    return f"Pearson {pearson:.3f}, Spearman {spearman:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="scenes")
    parser.add_argument("--data", default="scenes:50", help="a name of vitrail data")
    parser.add_argument("--images", type=int, default=50)
    parser.add_argument("--permutations", type=int, default=32)
    parser.add_argument("--methods", default=METHODS, help="calls, separated by semicolons")
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    view, data = vitrail.load(options.model, device=options.device), open_data(options.data)
    pictures = [view.preprocess(data[i].image) for i in range(min(options.images, len(data)))]
    images = torch.stack(pictures).to(view.device)
    measured = partial(maps, view, images, view.logits(images).argmax(1), options.batch)
    shapley = f"shapley(permutations={options.permutations},precision=full,seed="
    reference = measured(f"{shapley}0)")
    print(f"{view.name}, {len(images)} images of {data.name}, {options.permutations} permutations")
    print(f"  {'another seed':32} {agreement(measured(f'{shapley}1)'), reference)}", flush=True)
    own = ["vit_shapley"] if embedded_explainer(view) else []
    for call in [*own, *(text.strip() for text in options.methods.split(";"))]:
        print(f"  {call:32} {agreement(measured(call), reference)}", flush=True)


if __name__ == "__main__":
    main()
