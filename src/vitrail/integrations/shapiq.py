"""Scores of subsets of the patches as a game, for shapiq's Shapley values and interactions."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.engine.modes import own_modes
from vitrail.engine.requests import Asking, Batch, Traced
from vitrail.engine.scheduler import Scheduler
from vitrail.errors import VitrailError
from vitrail.methods.layerwise import Output
from vitrail.methods.shapley import Shapley
from vitrail.models.loading import as_view
from vitrail.models.view import View
from vitrail.targets import ClassSpec, Target

try:
    import shapiq
except ImportError:
    raise VitrailError("a game of patches needs shapiq, which is not installed: pip install shapiq.") from None


class PatchGame(shapiq.Game):  # type: ignore[misc]
    """The game whose values ``shapley`` samples: the score of an image when only some of its patches are present.

    Args:
        model: what is explained: a plain ViT, from whose input patches can be removed.
        image: (3, H, W) normalised.
        target: the class; None = the predicted one.
        against: score the difference to this class.
        output: "probability" or "logit": what the score is.
        players: (rows, columns) of integers from 0: the player that each patch belongs to; None = each its own.
        normalize: whether the score of no patch at all is subtracted.
    """

    def __init__(
        self,
        model: View | nn.Module | str,
        image: Tensor,
        target: ClassSpec = None,
        against: ClassSpec = None,
        *,
        output: Output = "probability",
        players: Tensor | np.ndarray | None = None,
        normalize: bool = True,
    ) -> None:
        self.method = Shapley(as_view(model), output=output)
        view = self.method.model
        images = view.check_images(image if image.ndim == 4 else image[None], view.precision)
        if len(images) != 1:
            raise VitrailError(f"a game is about one image, but got {len(images)}.")
        self.batch = Batch(view, images)
        self.target = Target.of(view, target, against, 1)
        self.players = _checked_players(players, view.grid)
        count = int(self.players.max()) + 1
        empty = float(self.value_function(np.zeros((1, count), dtype=bool))[0]) if normalize else None
        super().__init__(count, normalize=normalize, normalization_value=empty)

    def value_function(self, coalitions: np.ndarray) -> np.ndarray:
        """(M, players) of bools → (M,): the scores with only these players present."""
        present = torch.as_tensor(np.asarray(coalitions, dtype=bool))[:, self.players]
        with own_modes():
            return Scheduler().run([self._ask(present.to(self.batch.images.device))])[0].double().cpu().numpy()

    def _ask(self, present: Tensor) -> Asking[Tensor]:
        traces = yield [Traced(self.batch, self.target, spec) for spec in self.method.needs()]
        (subject,) = yield from self.method.subjects(self.batch, self.target, traces[0])
        return (yield from self.method.scorer(subject, self.method.output).token_sets(present))


def _checked_players(players: Tensor | np.ndarray | None, grid: tuple[int, int]) -> Tensor:
    """(N,): the player of each patch."""
    if players is None:
        return torch.arange(grid[0] * grid[1])
    numbers = torch.as_tensor(players)
    if tuple(numbers.shape) != grid or numbers.is_floating_point():
        raise VitrailError(
            f"players must be {grid[0]} × {grid[1]} integers, one for each patch, but got {tuple(numbers.shape)} of "
            f"{numbers.dtype}."
        )
    known = numbers.unique()
    if known.tolist() != list(range(len(known))):
        raise VitrailError(f"players must be numbered 0, 1, 2, … without gaps, but got {known.tolist()[:6]}.")
    return numbers.flatten().long()
