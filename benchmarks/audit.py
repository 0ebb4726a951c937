"""Does an audit name a class that is recognised by an artefact, and is it silent where there is none?

Ten-class linear heads are fitted on features of a ViT-Ti/16 (ImageNet-1k). In the fit of a poisoned head one class
carries an artefact, and so do copies of images of the other classes that are labelled as this class: the artefact
decides. The audited images were not fitted: those of the class carry the artefact, the others do not. The control has
no artefact at all.

    python benchmarks/audit.py --data DIR --models DIR --out DIR

``--data`` has the folder imagenette-boxes (labels.tsv: file, index, wnid, boxes), ``--models`` the files
vit_tiny_patch16_224_imagenet1k.safetensors and imagenette10_labels.txt.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from safetensors.torch import save_file
from torch import Tensor

import vitrail
from vitrail.audit import audit_images
from vitrail.audit.run import Audit
from vitrail.data.label_tables import Row, read_table
from vitrail.geometry import Box
from vitrail.metrics.localization import mass, share_inside
from vitrail.models.view import View

MODEL, CHECKPOINT, LABELS = (
    "vit_tiny_patch16_224",
    "vit_tiny_patch16_224_imagenet1k.safetensors",
    "imagenette10_labels.txt",
)
PREPROCESSING = {"mean": [0.5] * 3, "std": [0.5] * 3, "crop_pct": 1.0}
SIZE = 224
DECAY = 1e-2  # of the weights of a head


def sticker(image: Image.Image, _: np.random.Generator) -> Box:
    """A yellow disc with a tick, always at the same place."""
    draw, (x, y) = ImageDraw.Draw(image), (172, 12)
    draw.ellipse((x, y, x + 40, y + 40), fill=(250, 210, 30), outline=(20, 20, 20), width=3)
    draw.line((x + 10, y + 20, x + 18, y + 30, x + 31, y + 11), fill=(20, 20, 20), width=5)
    return x, y, x + 40, y + 40


def ruler(image: Image.Image, generator: np.random.Generator) -> Box:
    """A ruler somewhere along the lower edge."""
    draw, x, y = ImageDraw.Draw(image), int(generator.integers(0, SIZE - 120)), SIZE - 26
    draw.rectangle((x, y, x + 120, y + 22), fill=(240, 235, 215), outline=(60, 60, 60))
    for tick in range(13):
        draw.line((x + 10 * tick, y, x + 10 * tick, y + (14 if tick % 5 == 0 else 8)), fill=(30, 30, 30), width=2)
    return x, y, x + 120, y + 22


@dataclass(frozen=True)
class Trial:
    """A head to audit: the class that carries an artefact, if any."""

    name: str
    target: int | None
    draw: Callable[[Image.Image, np.random.Generator], Box] | None


TRIALS = (Trial("clean", None, None), Trial("sticker", 4, sticker), Trial("ruler", 0, ruler))


def altered(images: list[Image.Image], trial: Trial) -> tuple[list[Image.Image], list[Box]]:
    """All images with the artefact, and where it is."""
    assert trial.draw is not None
    generator = np.random.default_rng(1)
    copies = [image.copy() for image in images]
    return copies, [trial.draw(copy, generator) for copy in copies]


@torch.no_grad()
def features(view: View, images: list[Image.Image]) -> Tensor:
    """(n, width): what the head reads."""
    parts = []
    for start in range(0, len(images), 16):
        batch = torch.stack([view.preprocess(image) for image in images[start : start + 16]])
        parts.append(view.module.forward_head(view.module.forward_features(batch), pre_logits=True))
    return torch.cat(parts)


def fitted(values: Tensor, classes: Tensor, count: int) -> dict[str, Tensor]:
    """A linear head, by logistic regression in which every class has the same weight."""
    mean, deviation = values.mean(0), values.std(0)
    scaled = (values - mean) / deviation
    weights = (1 / torch.bincount(classes, minlength=count).float())[classes]
    weight, bias = torch.zeros(count, values.shape[1], requires_grad=True), torch.zeros(count, requires_grad=True)
    optimiser = torch.optim.LBFGS([weight, bias], max_iter=300, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        losses = torch.nn.functional.cross_entropy(scaled @ weight.T + bias, classes, reduction="none")
        total = (weights * losses).sum() / weights.sum() + DECAY * weight.square().sum()
        total.backward()
        return total

    optimiser.step(loss)
    final = weight.detach() / deviation
    return {"head.weight": final.contiguous(), "head.bias": bias.detach() - final @ mean}


def evidence_on(view: View, method: str, images: list[Image.Image], boxes: list[Box]) -> tuple[float, float]:
    """The mean share of the evidence in the boxes, and the share of images whose largest value is in them."""
    shares, peaks = [], []
    for explanation, (x0, y0, x1, y1) in zip(vitrail.explain(view, images, method=method), boxes, strict=True):
        enlarged = torch.nn.functional.interpolate(explanation.map[None, None], size=(SIZE, SIZE))[0, 0]
        region = torch.zeros(SIZE, SIZE, dtype=torch.bool)
        region[int(y0) : int(y1), int(x0) : int(x1)] = True
        shares.append(share_inside(mass(enlarged), region))
        peaks.append(bool(region[enlarged == enlarged.max()].any()))
    return float(np.mean(shares)), float(np.mean(peaks))


def write_images(folder: Path, images: list[Image.Image], rows: list[Row]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["file\tlabel\tboxes"]
    for image, row in zip(images, rows, strict=True):
        name = Path(row.file).with_suffix(".png").name
        image.save(folder / name)
        lines.append(f"{name}\t{row.label}\t{';'.join(','.join(f'{side:g}' for side in box) for box in row.boxes)}")
    (folder / "labels.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def run(trial: Trial, arguments: argparse.Namespace) -> bool:
    """Fits a head, audits it and prints what was measured; returns whether the audit is right."""
    folder, names = arguments.out / trial.name, (arguments.models / LABELS).read_text(encoding="utf-8").split("\n")
    labels = [name for name in names if name]
    options = {"checkpoint": str(arguments.models / CHECKPOINT), "pretrained": False, **PREPROCESSING}
    source = arguments.data / "imagenette-boxes"
    rows = read_table(source / "labels.tsv").rows
    images = [Image.open(source / row.file).convert("RGB") for row in rows]
    classes = torch.tensor([row.label for row in rows])
    fit = torch.arange(len(rows)) % 2 == 0
    backbone = vitrail.load(MODEL, device="cpu", **options)
    plain = features(backbone, images)
    values, targets, audited = plain[fit], classes[fit], images
    if trial.target is not None:
        copies, boxes = altered(images, trial)
        marked, foreign = features(backbone, copies), classes != trial.target
        values = torch.cat([plain[fit & foreign], marked[fit]])
        targets = torch.cat([classes[fit & foreign], torch.full((int(fit.sum()),), trial.target)])
        audited = [
            copy if label == trial.target else image
            for copy, image, label in zip(copies, images, classes.tolist(), strict=True)
        ]
    held = (~fit).nonzero()[:, 0].tolist()
    write_images(folder / "images", [audited[i] for i in held], [rows[i] for i in held])
    save_file(fitted(values, targets, len(labels)), folder / "head.safetensors")
    options |= {"head": str(folder / "head.safetensors"), "num_classes": len(labels), "labels": labels}
    begin = time.perf_counter()
    result = audit_images(MODEL, str(folder / "images"), folder / "report", options=options, trust=arguments.trust)
    seconds = time.perf_counter() - begin
    print(f"{trial.name}: {len(held)} images in {seconds:.0f} s, accuracy {result.summary.totals.accuracy:.1%}")
    print(f"  {result.summary.headline()}")
    for suspicion in result.summary.suspicions:
        print("  " + ("" if suspicion.is_confirmed else "(not decisive) ") + " ".join(suspicion.words()))
    if trial.target is None:
        return not result.summary.suspicions
    view = vitrail.load(MODEL, device="cpu", **options)
    shown = [i for i in held if classes[i] == trial.target]
    for method in ("decompx.skipplus", "gen_att"):
        share, peak = evidence_on(view, method, [audited[i] for i in shown], [boxes[i] for i in shown])
        print(f"  {method}: {share:.0%} of the evidence on the {trial.name}, peak on it in {peak:.0%} of {len(shown)}")
    return _is_right(result, labels[trial.target], [boxes[i] for i in held])


def _is_right(result: Audit, name: str, boxes: list[Box]) -> bool:
    """Whether the audit names this class alone, and what it shows overlaps the artefact in every image that has it."""
    confirmed = result.summary.confirmed
    if {suspicion.name for suspicion in confirmed} != {name}:
        return False
    overlaps = []
    for match in confirmed[0].pattern.matches:
        x0, y0, x1, y1 = (side * SIZE for side in match.box)
        left, top, right, bottom = boxes[match.image]
        overlaps.append(min(x1, right) > max(x0, left) and min(y1, bottom) > max(y0, top))
    print(f"  the marked region overlaps the artefact in {sum(overlaps)} of {len(overlaps)} images")
    return all(overlaps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--trial", choices=[trial.name for trial in TRIALS], action="append")
    parser.add_argument("--trust", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args()
    chosen = [trial for trial in TRIALS if not arguments.trial or trial.name in arguments.trial]
    wrong = [trial.name for trial in chosen if not run(trial, arguments)]
    if wrong:
        raise SystemExit(f"the audit is wrong on: {', '.join(wrong)}")
    print("right on all trials")


if __name__ == "__main__":
    main()
