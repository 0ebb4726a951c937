"""From a form to a task."""

from __future__ import annotations

import json
from typing import Any

from vitrail.app.server.errors import Refused
from vitrail.app.server.jobs import Task
from vitrail.app.server.schemas import Form, MaskForm
from vitrail.app.server.service import Picture, Service

MOST_METHODS = 100


async def picture_of(service: Service, form: Form) -> Picture:
    """The one picture that the form gives."""
    given = [name for name in ("image", "picture", "sample") if getattr(form, name) is not None]
    if len(given) != 1:
        told = " and ".join(given) or "none of them"
        raise Refused(422, f"give exactly one of image, picture and sample, but got {told}.")
    if form.image is not None:
        return await service.admit(await form.image.read())
    if form.picture is not None:
        return service.earlier(form.picture)
    return service.sample(form.sample or "")


def task_of(kind: str, form: Form, model: str, picture: Picture) -> Task:
    """The other fields as the worker takes them; those that are not given are left out."""
    fields: dict[str, Any] = form.model_dump(exclude={"image", "picture", "sample", "model", "wait"}, exclude_none=True)
    for name in ("params", "removed", "kept"):
        if name in fields:
            fields[name] = json.loads(fields[name])
    if isinstance(form, MaskForm) and form.removed is not None and form.kept is not None:
        raise Refused(422, "give the patches that are removed or those that are kept, not both.")
    if "methods" in fields:
        fields["methods"] = _methods(fields["methods"])
    return Task(kind, model, picture.id, fields)


def _methods(text: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not 1 <= len(names) <= MOST_METHODS:
        raise Refused(422, f"methods names {len(names)} methods, expected 1 to {MOST_METHODS}, with commas between.")
    return names
