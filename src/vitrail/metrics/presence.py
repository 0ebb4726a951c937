"""What the network says about an image of which only some cells are present."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.engine.requests import Asking, Pictures, Request, Subsets, Tokens
from vitrail.errors import VitrailError
from vitrail.methods.masking import Space
from vitrail.metrics.base import Case
from vitrail.metrics.curves import background
from vitrail.targets import Reading


def ask_present(
    case: Case, present: Tensor, space: Space, reading: Reading, about: tuple[int, ...], name: str
) -> Asking[Tensor]:
    """(M, …): what is read with only the cells of each mask ``present`` (M, rows, columns), bool.

    In pixels, absent cells of any size get the image's mean colour; in tokens, where cells are patches, they are
    removed from the sequence.
    """
    if space == "pixels":
        return (yield _shown(case, present, reading, about, name))
    if not case.view.has_tokens:
        raise VitrailError(f'space="tokens" needs tokens, which {case.view.name} does not have: use space="pixels".')
    present = present.flatten(1)
    counts = present.sum(1)
    if not counts.all():
        raise VitrailError(
            f"{name} removes some of the patches, but {case.view.name} has only {present.shape[1]}: use a model with "
            "more patches."
        )
    tokens = yield Tokens(case.batch)
    rows = [(counts == count).nonzero()[:, 0] for count in counts.unique()]
    requests: list[Request] = [
        Subsets(
            view=case.view,
            count=len(group),
            length=int(counts[group[0]]) + case.view.num_prefix,
            reading=reading,
            about=about,
            name=name,
            tokens=tokens,
            keep=present[group].nonzero()[:, 1].view(len(group), -1).to(tokens.device),
        )
        for group in rows
    ]
    answers = torch.cat((yield requests))
    return answers[torch.cat(rows).argsort().to(answers.device)]


def _shown(case: Case, present: Tensor, reading: Reading, about: tuple[int, ...], name: str) -> Pictures:
    blank = background(case, "mean", seed=0)

    def make(part: slice) -> Tensor:
        shown = F.interpolate(present[part, None].to(case.pixels), size=case.size, mode="nearest-exact")
        return torch.where(shown > 0, case.pixels, blank)

    return case.pictures(len(present), make, reading, about=about, name=name)
