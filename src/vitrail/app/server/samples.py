"""The pictures that a server offers to those who have none at hand."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import PurePath

FOLDER = files("vitrail.app") / "samples"

KINDS = {".jpg": "image/jpeg", ".png": "image/png"}

# File, title, the model that knows what is on it.
CATALOGUE = (
    ("cat.jpg", "A cat", "photo"),
    ("coffee.jpg", "A cup of coffee", "photo"),
    ("rocket.jpg", "A rocket", "photo"),
    ("star-and-heart.png", "Star and heart", "scenes"),
    ("ring-and-hourglass.png", "Ring and hourglass", "scenes"),
)


@dataclass(frozen=True)
class Sample:
    """One picture; ``id`` is what an upload of it would get."""

    name: str
    file: str
    title: str
    model: str | None
    data: bytes

    @property
    def id(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def kind(self) -> str:
        return KINDS[PurePath(self.file).suffix]

    def row(self) -> dict[str, str | None]:
        """What ``/api/samples`` says of it."""
        url = f"/samples/{self.file}"
        return {"name": self.name, "title": self.title, "model": self.model, "url": url, "thumbnail": url}


def read_samples(models: list[str]) -> dict[str, Sample]:
    """Every sample; ``model`` is None where the one it suits is not among those served."""
    found = {}
    for file, title, model in CATALOGUE:
        name = PurePath(file).stem
        found[name] = Sample(name, file, title, model if model in models else None, (FOLDER / file).read_bytes())
    return found
