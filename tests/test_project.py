"""Guarantees about the project itself."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

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


def test_the_demo_explains_a_photograph_that_the_model_recognises() -> None:
    import vitrail

    makefile = (Path(__file__).parents[1] / "Makefile").read_text(encoding="utf-8")
    (photo,) = re.findall(r"^PHOTO := (.*)$", makefile, re.MULTILINE)
    explanation = vitrail.explain(vitrail.load(), Path(__file__).parents[1] / photo)
    assert (explanation.label, explanation.probability > 0.9) == ("espresso", True)
    assert f"{explanation.label} in $(PHOTO)" in makefile
    assert f"vitrail-out/{Path(photo).stem}.{explanation.method}.png" in makefile
