"""How close `vit_cx` is to a literal version of its release: rank correlations of maps, image by image.

Run from the repository's root:
    python -m benchmarks.release --data DIR [--images 8]
`DIR` is the folder of `vitrail bench leaderboard --data DIR`; the model is its ViT-Ti/16. The literal version is the
test oracle (tests/oracles/vit_cx.py) on the output of the last first norm, caught by a hook. Noise is random, so two of
its runs differ: `vit_cx` should agree with a run as well as another run does.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from scipy.stats import spearmanr
from tests.oracles import vit_cx as literal
from torch import Tensor

from vitrail.bench.run import load_model, open_plan_data
from vitrail.bench.suite import open_suite
from vitrail.methods.registry import build_method

CHUNK = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--images", type=int, default=8)
    options = parser.parse_args()
    pair = next(pair for pair in open_suite("leaderboard", options.data).pairs if pair.name == "photographs")
    assert pair.plan is not None, pair.missing
    view = load_model(pair.plan.models[0])
    data = open_plan_data(replace(pair.plan, images=options.images))
    totals = []
    for place in range(len(data)):
        image = view.preprocess(data[place].image)[None].to(view.device)
        ours = build_method("vit_cx", view).attribute(image)[0]
        first, second = (released(view.module, image, view.grid, seed) for seed in (1, 2))
        totals.append((correlation(ours, first), correlation(first, second)))
        print(f"{data.ids[place]}: vit_cx and the release {totals[-1][0]:.3f}, two of its runs {totals[-1][1]:.3f}")
    means = torch.tensor(totals).mean(0).tolist()
    print(f"mean of {len(data)}: {means[0]:.3f} and {means[1]:.3f}")


@torch.no_grad()
def released(module: torch.nn.Module, image: Tensor, grid: tuple[int, int], seed: int) -> Tensor:
    """The map (H, W) of the literal version."""
    caught: list[Tensor] = []
    norm = module.get_submodule("blocks")[-1].norm1  # type: ignore[index, union-attr]
    handle = norm.register_forward_hook(lambda _module, _inputs, output: caught.append(output))
    try:
        target = int(module(image).argmax(1))
    finally:
        handle.remove()
    patches = caught[0][0, -grid[0] * grid[1] :]
    features = patches.T.unflatten(1, grid).cpu().double()

    def probability(images: Tensor) -> Tensor:
        parts = [module(part.to(image)).softmax(1)[:, target] for part in images.split(CHUNK)]
        return torch.cat(parts).cpu().double()

    picture = image.cpu().double()
    masks = literal.masks_of(features, (image.shape[2], image.shape[3]), 0.1)
    generator = torch.Generator().manual_seed(seed)
    noises = 0.1 * torch.randn(len(masks), *picture.shape[1:], generator=generator, dtype=torch.float64)
    return literal.saliency(masks, literal.scores(probability, picture, masks, noises), authors=True)


def correlation(a: Tensor, b: Tensor) -> float:
    return float(spearmanr(a.flatten().cpu().numpy(), b.flatten().cpu().numpy()).statistic)


if __name__ == "__main__":
    main()
