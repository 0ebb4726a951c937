"""The reference of the API at /api/docs, rendered from the OpenAPI description: no scripts, no external resources."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jinja2 import Environment, PackageLoader

Schema = dict[str, Any]


def render_reference(schema: Schema) -> str:
    """One section per operation: description, fields, answers."""
    loader = PackageLoader("vitrail.app", "page")
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)

    def fields(operation: Schema) -> Iterator[Schema]:
        for parameter in operation.get("parameters", []):
            yield parameter["schema"] | parameter
        for content in operation.get("requestBody", {}).get("content", {}).values():
            form = schema["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]]
            yield from (field | {"name": name} for name, field in form["properties"].items())

    environment.filters |= {"fields": fields, "type": _type, "answers": _answers}
    return environment.get_template("reference.html").render(schema=schema)


def _type(schema: Schema) -> str:
    if "anyOf" in schema:
        return " or ".join(_type(option) for option in schema["anyOf"] if option.get("type") != "null")
    if "enum" in schema:
        return " or ".join(map(str, schema["enum"]))
    if "contentMediaType" in schema or schema.get("format") == "binary":
        return "file"
    return str(schema.get("type", "text"))


def _answers(operation: Schema) -> Iterator[str]:
    """The successful ones, by status: a model, a list of models, a media type, or nothing."""
    for status, answer in operation["responses"].items():
        if int(status) < 300:
            contents: Schema = answer.get("content") or {"nothing": {}}
            media, content = next(iter(contents.items()))
            schema = content.get("schema", {})
            reference = schema.get("items", schema).get("$ref", "")
            kind = "list of " if "items" in schema else ""
            yield f"{status} {kind}{reference.rpartition('/')[2] or media}"
