"""What the caller has set has no effect inside, and is as it was afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from vitrail.engine.modes import own_modes

PRODUCTS: Any = torch.backends.cuda.matmul


def sums() -> tuple[bool, bool, bool]:
    """How CUDA adds up products of half precision; the setting is that of the process, with or without a GPU."""
    return (
        PRODUCTS.allow_fp16_reduced_precision_reduction,
        PRODUCTS.allow_fp16_reduced_precision_reduction_split_k,
        PRODUCTS.allow_fp16_accumulation,
    )


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    *reduction, accumulation = sums()
    yield
    PRODUCTS.allow_fp16_reduced_precision_reduction = reduction
    PRODUCTS.allow_fp16_accumulation = accumulation


@pytest.mark.parametrize("accumulation", [False, True])
@pytest.mark.parametrize("reduction", [(True, True), (False, True), (False, False)])  # torch has no (True, False)
def test_sums_of_half_precision_are_in_single_precision(reduction: tuple[bool, bool], accumulation: bool) -> None:
    PRODUCTS.allow_fp16_reduced_precision_reduction = reduction
    PRODUCTS.allow_fp16_accumulation = accumulation
    with own_modes():
        assert sums() == (False, True, False)
        with own_modes():
            assert sums() == (False, True, False)
        assert sums() == (False, True, False), "the outer one is not over"
    assert sums() == (*reduction, accumulation)
    with pytest.raises(KeyError), own_modes():
        raise KeyError
    assert sums() == (*reduction, accumulation)
