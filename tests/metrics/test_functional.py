"""Every metric that asks the model is a function of its file too."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from tests.metrics.common import TOKEN_KINDS, bench

from vitrail import VitrailError
from vitrail.methods.registry import build_method
from vitrail.metrics import list_metrics, measure
from vitrail.metrics.base import get_metric

FAMILIES = ("perturbation", "token masking", "agreement", "robustness")
SMALL = {"steps": 4, "samples": 2, "runs": 4}


@pytest.mark.parametrize("name", [name for name, info in list_metrics().items() if info.family in FAMILIES])
def test_a_function_gives_the_values_of_the_metric(name: str) -> None:
    of = bench("timm_vit")
    info = list_metrics()[name]
    function = getattr(import_module(get_metric(name).__module__), name)
    params = {key: value for key, value in SMALL.items() if key in info.params}
    known = {"method": build_method("gen_att", of.view)} if info.needs == "method" else {}
    maps = of.maps(TOKEN_KINDS)
    result = function(of.view, of.images, maps, [1, 0], **known, **params)
    assert result.dtype == torch.float64
    assert result.tolist() == [
        score.value for score in measure(name, of.view, of.images, maps, [1, 0], **known, **params)
    ]
    assert function.__name__ == name
    assert function.__doc__.startswith(info.summary)
    with pytest.raises(VitrailError, match=f"{name} has no parameter colour"):
        function(of.view, of.images, maps, **known, colour="red")
