"""What is wrong with a field, in plain words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EXPECTED = {
    "string_too_long": "it is too long, expected at most {max_length} letters",
    "too_long": "it is too long, expected at most {max_length} letters",
    "string_type": "expected text",
    "string_pattern_mismatch": "expected the id of an earlier upload, as /api/predict gives it",
    "int_parsing": "expected a whole number",
    "int_parsing_size": "expected a smaller whole number",
    "int_from_float": "expected a whole number",
    "int_type": "expected a whole number",
    "greater_than_equal": "expected {ge} or more",
    "less_than_equal": "expected {le} or less",
    "bool_parsing": "expected true or false",
    "bool_type": "expected true or false",
    "literal_error": "expected {expected}",
    "extra_forbidden": "there is no such field, see /api/docs",
    "missing": "it is missing",
}


def sentence(error: Mapping[str, Any]) -> str:
    """One error of pydantic's; what was sent is not repeated, it may be long."""
    name = ".".join(str(part) for part in error["loc"][1:])[:80] or "the form"
    if name == "image":
        return "image: expected a file, but got text."
    known = EXPECTED.get(error["type"])
    if known is not None:
        return f"{name}: {known.format(**error.get('ctx', {}))}."
    told = error["msg"].removeprefix("Value error, ")  # what schemas.py says itself
    return f"{name}: {told[:1].lower()}{told[1:]}."
