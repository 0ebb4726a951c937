"""A plugin of the test server: trust is asked of few subsets, where its value is not the point."""

from __future__ import annotations

from vitrail.metrics import trust

FEW = {"SUBSETS": 8, "RANDOM": 2}

if __name__.startswith("quick_trust_"):  # imported as a plugin
    for name, value in FEW.items():
        setattr(trust, name, value)
