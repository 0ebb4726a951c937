"""Noise that depends on a seed and a number alone."""

from __future__ import annotations

import torch
from scipy.stats import kstest

from vitrail.engine.noise import noise


def test_noise_is_noise_and_depends_on_seed_and_number_alone() -> None:
    cpu = torch.device("cpu")
    normal = noise("normal", (3, 101, 7), range(40), 0, cpu)
    assert abs(float(normal.mean())) < 0.01
    assert abs(float(normal.var()) - 1) < 0.02
    assert kstest(normal.flatten().numpy(), "norm").pvalue > 1e-3
    uniform = noise("uniform", (5000,), range(20), 3, cpu)
    assert kstest(uniform.flatten().numpy(), "uniform").pvalue > 1e-3
    assert 0 <= uniform.min() <= uniform.max() < 1
    correlation = torch.corrcoef(uniform) - torch.eye(20)
    assert correlation.abs().max() < 5 / 5000**0.5
    shifted_by_one = torch.corrcoef(torch.stack([uniform[0, :-1], uniform[0, 1:], uniform[1, 1:]]))
    assert (shifted_by_one - torch.eye(3)).abs().max() < 5 / 5000**0.5
    assert torch.equal(noise("uniform", (5000,), range(7, 9), 3, cpu), uniform[7:9])
    assert not torch.equal(noise("uniform", (5000,), range(7, 9), 4, cpu), uniform[7:9])
