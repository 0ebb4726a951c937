"""Trains the embedded model `photo`: `python training/photo.py DATA --teacher FILE --photos FOLDER --out FOLDER`.

DATA holds Tiny-ImageNet (train-*.npz, val.npz, classes.tsv). The student starts from random weights and learns from the
labels and from a frozen DINOv2 teacher that sees the same views. The run ends, fully annealed, so many seconds
after it began; one that was cut short goes on from `resume.pt` in the out folder.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tiny_imagenet
import torch
from augment import mix, random_views
from kept_tokens import choose_patches, features, predict
from optimisers import Optimiser, learning_rate
from shipping import save_half
from teacher import GRID, WIDTH, Lesson, Teacher, fit_head
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax, mse_loss

ARCHITECTURE = {
    "img_size": 64, "patch_size": 4, "embed_dim": 256, "depth": 8, "num_heads": 4, "mlp_ratio": 3, "num_classes": 200,
}  # fmt: skip
SIDE = 16  # patches along a side
PATCHES = SIDE * SIDE
FEWER_PATCHES = (127, 159, 191, 223)  # with CLS a multiple of 32 tokens, which attention kernels like
ONLY_HALF_UNTIL = 0.45  # of the schedule: half of the patches teach almost as much in half of the time


class Student(nn.Module):
    """The network that ships, and the projections onto the teacher's features, which do not."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = VisionTransformer(**ARCHITECTURE)
        width = ARCHITECTURE["embed_dim"]
        self.projections = nn.ModuleDict({"cls": nn.Linear(width, WIDTH), "patches": nn.Linear(width, WIDTH)})
        cell = torch.arange(SIDE) * GRID // SIDE
        self.register_buffer("teacher_patch", (cell[:, None] * GRID + cell).flatten())

    def loss(
        self, tokens: Tensor, kept: Tensor, lesson: Lesson, labels: Tensor, share: Tensor
    ) -> tuple[Tensor, Tensor]:
        """For classes and for features; `share` of an image is its own, the rest its mirror place in the batch."""
        logits = self.vit.head(tokens[:, 0]).float()
        first, second = (cross_entropy(logits, classes, reduction="none") for classes in (labels, labels.flip(0)))
        mixup = (first * share + second * (1 - share)).mean()
        taught = -(lesson.logits.float().softmax(1) * log_softmax(logits, dim=1)).sum(1).mean()
        cell = self.teacher_patch[kept][..., None].expand(-1, -1, WIDTH)
        patches = mse_loss(self.projections["patches"](tokens[:, 1:]).float(), lesson.patches.gather(1, cell).float())
        whole = mse_loss(self.projections["cls"](tokens[:, 0]).float(), lesson.cls.float())
        return 0.3 * mixup + 0.7 * taught, patches + whole


class Trainer:
    """Everything on one device: images, teacher, student, optimiser."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.device = arguments, "cuda" if torch.cuda.is_available() else "cpu"
        self.batch, self.began, self.elapsed = arguments.batch, time.time(), 0.0
        self._read_data()
        self._make_teacher()
        self.student = Student().to(self.device)
        self.optimiser = Optimiser(self.student.vit, self.student.projections)
        self.averaged = VisionTransformer(**ARCHITECTURE).to(self.device).eval()
        self.views, self.loss = random_views, self.student.loss
        self._resume()
        if arguments.compile:
            self._compile()
        self.batches = self._batches()

    def _say(self, text: str) -> None:
        print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)

    def _read_data(self) -> None:
        folder, limit = self.arguments.data, self.arguments.limit
        images, labels = tiny_imagenet.read_train(folder, limit)
        val_images, val_labels = tiny_imagenet.read_images(folder / "val.npz", limit)
        photos, _ = tiny_imagenet.read_photos(self.arguments.photos)
        unseen = [
            val_images,
            *(np.stack([view(p) for p in photos]) for view in (tiny_imagenet.centre_crop, tiny_imagenet.squash)),
        ]
        twins = tiny_imagenet.near_duplicates(images, np.concatenate(unseen))
        kept = np.setdiff1d(np.arange(len(images)), twins)
        self._say(
            f"{len(images)} training images, {len(twins)} left out as likely copies of validation images or photos"
        )
        self.images, self.val_images = (
            torch.from_numpy(part).to(self.device).permute(0, 3, 1, 2).contiguous()
            for part in (images[kept], val_images)
        )
        self.labels, self.val_labels = (torch.from_numpy(part).to(self.device) for part in (labels[kept], val_labels))

    @torch.no_grad()
    def _summaries(self, images: Tensor, augment: bool) -> Tensor:
        parts = []
        for part in images.split(1000):
            cls, patches = self.teacher.features(random_views(part) if augment else tiny_imagenet.normalise(part))
            parts.append(torch.cat([cls, patches.mean(dim=1)], dim=1).half())
        return torch.cat(parts)

    def _make_teacher(self) -> None:
        """The head sees training images only."""
        self.teacher = Teacher(self.arguments.teacher, classes=200).to(self.device)
        if self.device == "cuda":
            self.teacher.backbone.bfloat16()
        self.teacher.measure(tiny_imagenet.normalise(self.images[:4000]))
        plain, varied = self._summaries(self.images, augment=False), self._summaries(self.images, augment=True)
        fit_head(self.teacher, torch.cat([plain, varied]), self.labels.repeat(2), steps=self.arguments.head_steps)
        guess = self.teacher.head(self._summaries(self.val_images, augment=False).float()).argmax(dim=1)
        self._say(f"teacher fitted: {self._percent(guess == self.val_labels)} on validation")

    def _compile(self) -> None:
        for block in self.student.vit.blocks:
            block.compile(dynamic=False)
        self.teacher.compile(dynamic=False)
        self.views = torch.compile(random_views, dynamic=False)
        self.loss = torch.compile(self.student.loss, dynamic=False)

    @staticmethod
    def _percent(right: Tensor) -> str:
        return f"{100 * right.float().mean().item():.2f} %"

    def _batches(self) -> Iterator[Tensor]:
        while True:
            order = torch.randperm(len(self.labels), device=self.device)
            yield from order[: len(order) // self.batch * self.batch].split(self.batch)

    def _patches_to_keep(self, progress: float) -> int:
        if progress < ONLY_HALF_UNTIL:
            return FEWER_PATCHES[0]
        return PATCHES - 1 if random.random() < 0.5 else random.choice(FEWER_PATCHES)

    def step(self, patches: int, progress: float, rate: float) -> Tensor:
        chosen = next(self.batches)
        kind = random.choices(("none", "blend", "paste"), (0.4, 0.2, 0.4))[0]
        views, share = mix(self.views(self.images[chosen]), kind)
        with torch.no_grad():
            lesson = self.teacher(views)
        kept = choose_patches(len(views), PATCHES, patches, self.device)
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            tokens = features(self.student.vit, views, kept)
            of_classes, of_features = self.loss(tokens, kept, lesson, self.labels[chosen], share)
        loss = of_classes + (1 - 0.8 * progress) * of_features
        loss.backward()
        self.optimiser.step(rate)
        return loss.detach()

    def warm_up(self) -> None:
        """Compiles every size before the clock starts, and times it; a learning rate of zero changes nothing."""
        for patches in (PATCHES - 1, *FEWER_PATCHES):
            for repeat in range(2 * self.arguments.warm_up):
                if repeat == self.arguments.warm_up:
                    self._wait()
                    start = time.time()
                self.step(patches, 0.0, 0.0)
            launched = time.time() - start
            self._wait()
            each = 1000 / self.arguments.warm_up
            self._say(
                f"{patches} patches: {each * (time.time() - start):.1f} ms a step, {each * launched:.1f} to launch"
            )

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def train(self) -> None:
        start, saved, before = time.time(), time.time(), self.elapsed
        length = before + self.began + self.arguments.seconds - start
        reported = int(20 * before / length)
        while (progress := (before + time.time() - start) / length) < 1:
            loss = self.step(self._patches_to_keep(progress), progress, learning_rate(progress, self.arguments.rate))
            self.elapsed = before + time.time() - start
            if progress >= reported / 20:
                reported += 1
                self._say(f"{progress:.0%}, {self.optimiser.steps} steps, loss {loss.item():.3f}: {self.report()}")
            if time.time() - saved > self.arguments.save_every:
                saved = time.time()
                self.save()
        self.save()
        self._say(f"end, {self.optimiser.steps} steps of {self.batch}: {self.report()}")

    def report(self) -> str:
        self.averaged.load_state_dict(self.optimiser.averaged)
        images = tiny_imagenet.normalise(self.val_images)
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            whole, half = (predict(self.averaged, images, share).argmax(1) for share in (1.0, 0.5))
        return f"validation {self._percent(whole == self.val_labels)}, half {self._percent(half == self.val_labels)}"

    def save(self) -> None:
        folder = self.arguments.out
        save_half(self.optimiser.averaged, folder / "photo.safetensors")
        state = {
            "student": self.student.state_dict(), "optimiser": self.optimiser.state(), "elapsed": self.elapsed,
            "teacher_head": self.teacher.head.state_dict(), "mean": self.teacher.mean, "std": self.teacher.std,
        }  # fmt: skip
        torch.save(state, folder / "resume.part")
        (folder / "resume.part").replace(folder / "resume.pt")

    def _resume(self) -> None:
        path = self.arguments.out / "resume.pt"
        if not path.exists():
            return
        state = torch.load(path, map_location=self.device)
        self.student.load_state_dict(state["student"])
        self.optimiser.load(state["optimiser"])
        self.teacher.head.load_state_dict(state["teacher_head"])
        self.teacher.mean.copy_(state["mean"])
        self.teacher.std.copy_(state["std"])
        self.elapsed = state["elapsed"]
        self._say(f"going on after {self.elapsed:.0f} s and {self.optimiser.steps} steps")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder of Tiny-ImageNet")
    parser.add_argument("--teacher", type=Path, required=True, help="DINOv2 ViT-S/14 in timm's layout, safetensors")
    parser.add_argument("--photos", type=Path, required=True, help="photographs that must stay unseen, with labels.tsv")
    parser.add_argument("--out", type=Path, required=True, help="folder for photo.safetensors and resume.pt")
    parser.add_argument("--seconds", type=float, default=1660, help="when to end, from the start of the script")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--rate", type=float, default=1.5e-3)
    parser.add_argument("--head-steps", type=int, default=1500, help="steps for the teacher's head")
    parser.add_argument("--warm-up", type=int, default=10, help="steps of each size, compiled and timed at the start")
    parser.add_argument("--save-every", type=float, default=60, help="seconds between checkpoints")
    parser.add_argument("--limit", type=int, help="use only so many images (to try the script)")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    return parser.parse_args()


if __name__ == "__main__":
    torch.manual_seed(0)
    random.seed(0)
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64
    arguments = parse_arguments()
    trainer = Trainer(arguments)
    trainer.warm_up()
    if arguments.seconds > 0:
        trainer.train()
