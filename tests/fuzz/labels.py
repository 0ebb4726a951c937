"""Files of class names: text and JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests import families
from tests.fuzz.harness import Input, Use
from tests.fuzz.mutation import TEXTS, altered, damaged

import vitrail

NAMES = ["ant", "bee, honey bee", "Katze", "chien 🐕", "éland"]
FORMS = (NAMES, {str(i): name for i, name in enumerate(NAMES)})


@contextmanager
def target(place: Path) -> Iterator[Use]:
    module = families.build("timm_vit")

    def use(path: Path, out: Path) -> None:
        view = vitrail.wrap(module, labels=path)
        assert len(view.labels) == families.CLASSES
        assert all(isinstance(name, str) for name in view.labels)

    yield use


def generate(draw: random.Random) -> Input:
    is_json = draw.random() < 0.6
    if is_json:
        text = json.dumps(altered(draw.choice(FORMS), draw), ensure_ascii=draw.random() < 0.5)
        text = draw.choice((text, text, "[" * draw.choice((10, 100_000)), '{"0":' * 5000, text * 2))
    else:
        lines = [draw.choice((name, draw.choice(TEXTS))) for name in NAMES]
        text = draw.choice(("\n", "\r\n", "\r", "\u2028")).join(lines)
    data = draw.choice((b"", b"", b"\xef\xbb\xbf", b"\xff\xfe")) + text.encode("utf-8", "surrogatepass")
    return Input(f"labels{'.json' if is_json else '.txt'}", damaged(data, draw) if draw.random() < 0.4 else data)
