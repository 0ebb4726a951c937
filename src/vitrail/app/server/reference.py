"""The reference of the API at /api/docs, rendered from the OpenAPI description: no scripts, no external resources."""

from __future__ import annotations

from html import escape
from typing import Any

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h2 { margin: 2.5rem 0 0; font-size: 1.1rem; }
code, h2 { font-family: ui-monospace, monospace; }
table { border-collapse: collapse; width: 100%; margin: .5rem 0; }
td, th { text-align: left; vertical-align: top; padding: .2rem .8rem .2rem 0; border-top: 1px solid #8886; }
"""


def render_reference(schema: dict[str, Any]) -> str:
    """One section per operation: description, fields, answers."""
    components = schema.get("components", {}).get("schemas", {})
    sections = [
        _section(path, verb, operation, components)
        for path, verbs in schema["paths"].items()
        for verb, operation in verbs.items()
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>vitrail: HTTP API</title>'
        '<meta name="viewport" content="width=device-width"><link rel="icon" href="/static/favicon.svg">'
        '<link rel="stylesheet" href="/api/docs.css"></head>'
        f"<body><main><h1>vitrail {escape(schema['info']['version'])}: HTTP API</h1>"
        '<p>Also as <a href="/api/openapi.json">OpenAPI description</a>. Bodies are forms (multipart/form-data); '
        "errors are JSON objects with a sentence in <code>error</code>.</p>"
        f"{''.join(sections)}</main></body></html>"
    )


def _section(path: str, verb: str, operation: dict[str, Any], components: dict[str, Any]) -> str:
    rows = [(p["name"], p["schema"], p.get("description", "")) for p in operation.get("parameters", [])]
    for content in operation.get("requestBody", {}).get("content", {}).values():
        form = _resolve(content["schema"], components)
        rows += [(name, field, field.get("description", "")) for name, field in form.get("properties", {}).items()]
    body = "".join(_row(name, field, text) for name, field, text in rows)
    table = f"<table><tr><th>field</th><th>type</th><th>default</th><th></th></tr>{body}</table>" if rows else ""
    answers = ", ".join(
        f"{status} {escape(_answer(answer))}" for status, answer in operation["responses"].items() if int(status) < 300
    )
    title = f"{verb.upper()} {escape(path)}"
    return f"<h2>{title}</h2><p>{escape(operation.get('description', ''))}</p>{table}<p>Answers: {answers}.</p>"


def _row(name: str, field: dict[str, Any], text: str) -> str:
    default = "" if field.get("default") is None else str(field["default"])
    cells = (f"<code>{escape(name)}</code>", escape(_type(field)), escape(default), escape(text))
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _type(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_type(option) for option in schema["anyOf"] if option.get("type") != "null")
    if "enum" in schema:
        return " or ".join(map(str, schema["enum"]))
    if "contentMediaType" in schema or schema.get("format") == "binary":
        return "file"
    return str(schema.get("type", "text"))


def _answer(answer: dict[str, Any]) -> str:
    for media, content in answer.get("content", {}).items():
        schema = content.get("schema", {})
        item = schema.get("items", {}).get("$ref")
        name = str(item or schema.get("$ref", "")).rpartition("/")[2]
        return f"list of {name}" if item else name or media
    return "nothing"


def _resolve(schema: dict[str, Any], components: dict[str, Any]) -> dict[str, Any]:
    resolved: dict[str, Any] = components.get(schema.get("$ref", "").rpartition("/")[2], schema)
    return resolved
