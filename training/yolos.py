"""Trains a small YOLOS, a detector, on generated scenes: `python training/yolos.py --out FOLDER`.

Its blocks start from the weights of the embedded model `scenes`, which knows the shapes; the detection tokens and the
heads that say a class and a box are new. FOLDER then loads as `hf:FOLDER`. The model is not embedded: it is what
`benchmarks/boxes.py` explains. The same command goes on from the last save.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

import numpy as np
import torch
from optimisers import Optimiser, learning_rate
from safetensors.torch import load_file
from scenes import scale
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import YolosConfig, YolosForObjectDetection, YolosImageProcessor

from vitrail.data import Scenes

WEIGHTS = Path(__file__).parent.parent / "src" / "vitrail" / "weights" / "scenes.safetensors"
TRAIN_SEED, TEST_SEED = 3, 1_000_003
SIDE, NO_OBJECT = 64, len(Scenes.labels)
# Matrices of a block that take the same orthogonal step; each is one.
MATRICES = dict.fromkeys(
    (
        r"attention\.attention\.(?:query|key|value)\.weight",
        r"attention\.output\.dense\.weight",
        r"intermediate\.dense\.weight",
        r"layer\.\d+\.output\.dense\.weight",
    ),
    1,
)


@dataclass
class Drawn:
    """Scenes as tensors.

    Attributes:
        images: uint8 (n, 3, 64, 64).
        labels: (n, 2), the class of each object; −1 = there is no second one.
        boxes: (n, 2, 4), centre and edges (x, y, width, height) as shares of the image.
    """

    images: Tensor
    labels: Tensor
    boxes: Tensor

    def __getitem__(self, chosen: Tensor) -> Drawn:
        return Drawn(self.images[chosen], self.labels[chosen], self.boxes[chosen])

    def to(self, device: str) -> Drawn:
        return Drawn(self.images.to(device), self.labels.to(device), self.boxes.to(device))


def _draw_part(indices: range, seed: int, objects: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    scenes = Scenes(indices.stop, seed, objects)[indices.start :]
    labels = np.full((len(scenes), 2), -1, dtype=np.int64)
    boxes = np.full((len(scenes), 2, 4), 0.5, dtype=np.float32)
    for number, scene in enumerate(scenes):
        for place, item in enumerate(scene.objects):
            left, top, right, bottom = item.box
            labels[number, place] = item.label
            boxes[number, place] = (left + right) / 2, (top + bottom) / 2, right - left, bottom - top
            boxes[number, place] /= SIDE
    return np.stack([scene.image.transpose(2, 0, 1) for scene in scenes]), labels, boxes


def draw(count: int, seed: int, objects: int | None = None) -> Drawn:
    """Scenes of one or two objects, drawn on all cores."""
    parts = [range(start, min(start + 500, count)) for start in range(0, count, 500)]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        drawn = list(pool.map(_draw_part, parts, repeat(seed), repeat(objects)))
    return Drawn(*(torch.from_numpy(np.concatenate(arrays)) for arrays in zip(*drawn, strict=True)))


def vary(scenes: Drawn) -> Drawn:
    """Turn, mirror and recolour a batch: boxes move along, no class depends on any of these."""
    images, (x, y, width, height) = scenes.images, scenes.boxes.unbind(2)
    if random.random() < 0.5:
        images, x = images.flip(3), 1 - x
    for _ in range(random.randrange(4)):
        images, (x, y, width, height) = images.rot90(1, (2, 3)), (y, 1 - x, height, width)
    return Drawn(images[:, random.sample(range(3), 3)], scenes.labels, torch.stack([x, y, width, height], dim=2))


def corners(boxes: Tensor) -> Tensor:
    """(…, 4): centre and edges → left, top, right, bottom."""
    centre, edges = boxes.split(2, dim=-1)
    return torch.cat([centre - edges / 2, centre + edges / 2], dim=-1)


def overlap(boxes: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Intersection over union, and its generalised form, of boxes (…, 4) that broadcast."""
    first, second = corners(boxes), corners(others)
    low, high = torch.maximum(first[..., :2], second[..., :2]), torch.minimum(first[..., 2:], second[..., 2:])
    shared = (high - low).clamp(min=0).prod(-1)
    union = boxes[..., 2:].prod(-1) + others[..., 2:].prod(-1) - shared
    low, high = torch.minimum(first[..., :2], second[..., :2]), torch.maximum(first[..., 2:], second[..., 2:])
    hull = (high - low).prod(-1)
    iou = shared / union.clamp(min=1e-9)
    return iou, iou - (hull - union) / hull.clamp(min=1e-9)


def match(config: YolosConfig, logits: Tensor, boxes: Tensor, scenes: Drawn) -> Tensor:
    """(n, 2): the detection token of each object, so that the costs of both are least together.

    With two objects at most all pairs of tokens can be tried, on the device and for the whole batch.
    """
    right = logits.softmax(2).gather(2, scenes.labels.clamp(min=0)[:, None].expand(-1, logits.shape[1], -1))
    pairs = boxes[:, :, None], scenes.boxes[:, None]
    cost = config.bbox_cost * (pairs[0] - pairs[1]).abs().sum(3) - config.class_cost * right
    cost = cost - config.giou_cost * overlap(*pairs)[1]
    cost = cost.masked_fill((scenes.labels < 0)[:, None], 0)
    both = cost[:, :, None, 0] + cost[:, None, :, 1]
    both.diagonal(dim1=1, dim2=2).fill_(torch.inf)
    best = both.flatten(1).argmin(1)
    return torch.stack([best // logits.shape[1], best % logits.shape[1]], dim=1)


def loss_of(config: YolosConfig, logits: Tensor, boxes: Tensor, scenes: Drawn) -> Tensor:
    """What detectors with matched tokens are trained by: classes, distances and overlaps of boxes."""
    with torch.no_grad():
        tokens = match(config, logits, boxes, scenes)
    present = scenes.labels >= 0
    classes = torch.full(logits.shape[:2], NO_OBJECT, device=logits.device)
    classes.scatter_(1, tokens, scenes.labels.where(present, NO_OBJECT))
    weights = torch.ones(logits.shape[2], device=logits.device)
    weights[NO_OBJECT] = config.eos_coefficient
    said, true = boxes.gather(1, tokens[..., None].expand(-1, -1, 4)), scenes.boxes
    distance = config.bbox_loss_coefficient * (said - true).abs().sum(2)
    apart = config.giou_loss_coefficient * (1 - overlap(said, true)[1])
    return (
        cross_entropy(logits.transpose(1, 2), classes, weights) + ((distance + apart) * present).sum() / present.sum()
    )


def outputs(model: YolosForObjectDetection, images: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (n, tokens, classes + 1) and boxes (n, tokens, 4); the heads compute in single precision."""
    with torch.autocast(images.device.type, torch.bfloat16, enabled=images.is_cuda):
        tokens = model.vit(scale(images)).last_hidden_state[:, -model.config.num_detection_tokens :]
    tokens = tokens.float()
    return model.class_labels_classifier(tokens), model.bbox_predictor(tokens).sigmoid()


@torch.inference_mode()
def report(model: YolosForObjectDetection, test: dict[int, Drawn]) -> str:
    """Average precision (a box counts from an overlap of one half on), and how well the boxes of objects fit."""
    lines = []
    for objects, scenes in test.items():
        parts = [outputs(model, images) for images in scenes.images.split(1000)]
        logits, boxes = (torch.cat(values) for values in zip(*parts, strict=True))
        scores, classes = logits.softmax(2)[..., :-1].max(2)
        overlaps = overlap(boxes[:, :, None], scenes.boxes[:, None])[0] * (scenes.labels >= 0)[:, None]
        same = classes[:, :, None] == scenes.labels[:, None]
        candidates = (same & (overlaps >= 0.5)) * scores[:, :, None]
        best = candidates.amax(1, keepdim=True)
        hits = ((candidates == best) & (best > 0)).any(2)
        precisions = [
            average_precision(scores[classes == label], hits[classes == label], int((scenes.labels == label).sum()))
            for label in range(NO_OBJECT)
        ]
        fits = overlaps.masked_fill(~same, 0).amax(1)[scenes.labels >= 0]
        lines.append(
            f"{objects}-object scenes AP {np.nanmean(precisions):.2%}, "
            f"IoU of the best box of the class {fits.mean():.3f}, of {fits.ge(0.5).float().mean():.2%} at least 0.5"
        )
    return "; ".join(lines)


def average_precision(scores: Tensor, hits: Tensor, count: int) -> float:
    """The mean, over ``count`` objects, of the precision at which each is found; 0 for one that is not."""
    ordered = hits[scores.argsort(descending=True)].double()
    precision = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    return float((precision * ordered).sum() / count) if count else float("nan")


def build(detections: int) -> YolosForObjectDetection:
    """A YOLOS with the blocks of `scenes`."""
    config = YolosConfig(
        image_size=[SIDE, SIDE], patch_size=8, hidden_size=128, num_hidden_layers=6, num_attention_heads=4,
        intermediate_size=512, layer_norm_eps=1e-6, num_detection_tokens=detections, use_mid_position_embeddings=False,
        id2label=dict(enumerate(Scenes.labels)), label2id={name: number for number, name in enumerate(Scenes.labels)},
    )  # fmt: skip
    model = YolosForObjectDetection(config)
    known = {name: value.float() for name, value in load_file(WEIGHTS).items() if not name.startswith("head.")}
    state = model.state_dict()
    tokens = [state["vit.embeddings.detection_tokens"], state["vit.embeddings.position_embeddings"][:, -detections:]]
    for values in tokens:  # all would say the same if all were zero
        values.normal_(std=0.02)
    started = translated(known, tokens[1])
    missing, unexpected = model.load_state_dict(started, strict=False)
    assert not unexpected
    new = ("class_labels_classifier.", "bbox_predictor.", "vit.pooler.", "vit.embeddings.detection_tokens")
    assert all(name.startswith(new) for name in missing), missing
    return model


def translated(known: dict[str, Tensor], positions: Tensor) -> dict[str, Tensor]:
    """Weights of a ViT of timm under their names in a YOLOS."""
    state = {
        "vit.embeddings.cls_token": known["cls_token"],
        "vit.embeddings.position_embeddings": torch.cat([known["pos_embed"], positions], dim=1),
    }
    parts = {
        "norm1": "layernorm_before",
        "norm2": "layernorm_after",
        "attn.proj": "attention.output.dense",
        "mlp.fc1": "intermediate.dense",
        "mlp.fc2": "output.dense",
    }
    for name, value in known.items():
        owner, _, kind = name.rpartition(".")
        if owner == "patch_embed.proj":
            state[f"vit.embeddings.patch_embeddings.projection.{kind}"] = value
        elif owner == "norm":
            state[f"vit.layernorm.{kind}"] = value
        elif owner.startswith("blocks."):
            _, number, part = owner.split(".", 2)
            layer = f"vit.encoder.layer.{number}"
            if part == "attn.qkv":
                for target, rows in zip(("query", "key", "value"), value.chunk(3), strict=True):
                    state[f"{layer}.attention.attention.{target}.{kind}"] = rows
            else:
                state[f"{layer}.{parts[part]}.{kind}"] = value
    return state


def save(model: YolosForObjectDetection, folder: Path) -> None:
    """As `vitrail.load` reads it: with the colours and the size that it was trained with."""
    model.save_pretrained(folder)
    colours = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    YolosImageProcessor(size={"height": SIDE, "width": SIDE}, **colours).save_pretrained(folder)


def train(arguments: argparse.Namespace) -> None:
    torch.manual_seed(0)
    random.seed(0)
    arguments.out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    start, saved = time.time(), arguments.out / "training.pt"
    model, averaged = (build(arguments.detections).to(device) for _ in range(2))
    if not saved.exists():
        save(averaged, arguments.out)  # what cannot be written is known before the training
    scenes = draw(arguments.images, TRAIN_SEED).to(device)
    test = {objects: draw(arguments.test, TEST_SEED, objects).to(device) for objects in (1, 2)}
    print(f"drew {arguments.images} scenes in {time.time() - start:.0f} s", flush=True)
    optimiser, spent = Optimiser(model, average=0.999, kinds=MATRICES), 0.0
    if saved.exists():
        state = torch.load(saved, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimiser.load(state["optimiser"])
        spent = state["spent"]
        print(f"goes on after {spent:.0f} s, {optimiser.steps} steps", flush=True)
    reported = spent
    while spent < arguments.seconds:
        begin = time.time()
        chosen = torch.randint(len(scenes.images), (arguments.batch,), device=device)
        batch = vary(scenes[chosen])
        loss = loss_of(model.config, *outputs(model, batch.images), batch)
        loss.backward()
        optimiser.step(learning_rate(spent / arguments.seconds, arguments.rate))
        spent += time.time() - begin
        if spent - reported > arguments.every or spent >= arguments.seconds:
            reported, begin = spent, time.time()
            averaged.load_state_dict(averaged.state_dict() | optimiser.averaged)
            results = f"loss {float(loss.detach()):.3f}: {report(averaged.eval(), test)}"
            print(f"{spent:.0f} s, {optimiser.steps} steps, {results}", flush=True)
            torch.save({"model": model.state_dict(), "optimiser": optimiser.state(), "spent": spent}, f"{saved}.part")
            os.replace(f"{saved}.part", saved)
            save(averaged, arguments.out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the model and the saves")
    parser.add_argument("--seconds", type=float, default=120, help="length of the schedule, drawing not counted")
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--test", type=int, default=2000, help="held-out scenes of one and of two objects")
    parser.add_argument("--detections", type=int, default=6, help="detection tokens")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--every", type=float, default=30, help="seconds between saves")
    train(parser.parse_args())
