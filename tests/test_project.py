"""Guarantees about the project itself."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("code", ["import vitrail", "import vitrail.cli.program"])
def test_importing_is_quick(code: str) -> None:
    heavy = "torch timm transformers matplotlib pandas captum".split()
    check = f"{code}; import sys; print([m for m in {heavy!r} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_public_names_exist() -> None:
    import vitrail

    for name in vitrail.__all__:
        assert getattr(vitrail, name) is not None
    with pytest.raises(AttributeError):
        _ = vitrail.nonsense
