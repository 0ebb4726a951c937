"""No request that the OpenAPI description allows or forbids causes a server error."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)
from tests.app.serving import PATIENCE, Served

from vitrail.app.server.application import create_app
from vitrail.app.server.settings import Settings

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
PATHS = create_app(Settings(), ["scenes"]).openapi()["paths"]
CASES = [
    pytest.param(path, verb, mode, id=f"{verb} {path} {mode.value}")
    for path, verbs in PATHS.items()
    for verb, operation in verbs.items()
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    if mode is GenerationMode.POSITIVE or "parameters" in operation or "requestBody" in operation
]
EXAMPLES = 5


@pytest.fixture(scope="module")
def schema(small: Served) -> Any:
    return schemathesis.openapi.from_url(f"{small.url}/api/openapi.json")


@pytest.mark.parametrize(("path", "verb", "mode"), CASES)
def test_no_request_is_a_server_error(small: Served, schema: Any, path: str, verb: str, mode: GenerationMode) -> None:
    operation = schema[path][verb]

    @settings(max_examples=EXAMPLES, deadline=None, phases=[Phase.generate], derandomize=True, database=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(case=operation.as_strategy(generation_mode=mode), known=st.booleans())
    def holds(case: Case, known: bool) -> None:
        if known and isinstance(case.body, dict):  # an existing picture leads further than a missing one
            case.body = {k: v for k, v in case.body.items() if k not in ("image", "picture", "model")}
            case.body["sample"] = "cat"
            if path == "/api/compare":
                case.body.setdefault("methods", "rollout")  # instead of all that are recommended
        response = case.call(base_url=small.url, timeout=PATIENCE)
        case.validate_response(response, checks=CHECKS)

    holds()
