"""Do the signs of a map mean what they say? What prefix tokens and biases hold: left apart, spread evenly, or centred.

Run: python benchmarks/signs.py scenes photo [NAME=CHECKPOINT:FOLDER …] [--photos FOLDER] [--images 24]
For `decompx.skipplus`, explained for the predicted class and for the second class against it: how often the sign of the
map's sum is that of the score; how often the score falls without all positive patches and rises without all negative
ones; and the share of the effects of single patches (by absolute value) whose sign the map has. All three readings
order the patches alike.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from trust import opened

from vitrail.core.operations import Walk
from vitrail.methods.registry import build_method
from vitrail.models.view import View


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--photos", type=Path)
    parser.add_argument("--images", type=int, default=24)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    for spec in options.models:
        view, pictures = opened(spec, options)
        results: dict[tuple[str, str], list[list[float]]] = {}
        for picture in pictures:
            for key, values in measured(view, picture).items():
                results.setdefault(key, []).append(values)
        print(f"{view.name}, {len(pictures)} images: sign of the sum, falls without positive patches, rises without "
              "negative ones, effects of the right sign, share of positive patches")  # fmt: skip
        for (question, reading), values in results.items():
            print(f"  {question:9} {reading:8} " + "  ".join(f"{mean:.2f}" for mean in np.nanmean(values, axis=0)))


def measured(view: View, picture: object) -> dict[tuple[str, str], list[float]]:
    from vitrail.api import see

    image = see(view, picture).pixels[None].to(view.device)
    logits = view.logits(image)[0].detach()
    first, second = logits.topk(2).indices.tolist()
    results = {}
    for question, target, against in (("predicted", first, None), ("contrast", second, first)):
        result = build_method("decompx.skipplus", view).explain(image, target, against)
        extras = {name: float(value[0]) for name, value in result.extras.items()}
        apart = result.map[0].flatten() / extras["score_layers"]
        spread = apart + (extras["score_prefix"] + extras["score_biases"]) / len(apart)
        for reading, values in (("apart", apart), ("spread", spread), ("centred", apart - apart.mean())):
            results[question, reading] = facts(view, image, values, target, against, extras["score"])
    return results


@torch.no_grad()
def facts(view: View, image: Tensor, values: Tensor, target: int, against: int | None, score: float) -> list[float]:
    parts = view.architecture()
    tokens = Walk(parts).embed(image)

    def scores(keep: Tensor) -> Tensor:
        answers = []
        for part in keep.to(image.device).split(256):
            logits = Walk(parts, keep=part).encode(view.present(tokens.expand(len(part), -1, -1), part))
            answers.append(logits[:, target] - (0 if against is None else logits[:, against]))
        return torch.cat(answers)

    patches = torch.arange(len(values), device=image.device)
    single = score - scores(torch.stack([patches[patches != i] for i in patches]))
    without = [
        scores(kept[None])[0].item() if len(kept) else float("nan")
        for kept in (patches[values <= 0], patches[values >= 0])
    ]
    right = (values.sign() == single.sign()).float() * single.abs()
    return [
        float(np.sign(float(values.sum())) == np.sign(score)),
        float(without[0] < score),
        float(without[1] > score),
        float(right.sum() / single.abs().sum()),
        float((values > 0).float().mean()),
    ]


if __name__ == "__main__":
    main()
