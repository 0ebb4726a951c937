"""Multipart forms are parsed in memory: nothing is ever written to disk."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from vitrail.app.server.responses import RequestError

MAX_FILES = 2  # a picture and one that it is compared with
MAX_FIELDS = 24
MAX_FIELD_BYTES = 900_000


class MemoryParser(MultiPartParser):
    """Never spools a file to disk; the size of a body is limited before it arrives here."""

    spool_max_size = 2**40


class MemoryRequest(Request):
    """A request whose form stays in memory."""

    async def _get_form(self, **_: Any) -> FormData:
        if self._form is None:
            if not self.headers.get("content-type", "").lower().startswith("multipart/form-data"):
                raise RequestError(415, "expected a multipart/form-data body.")
            try:
                async with aclosing(self.stream()) as stream:
                    limits = {"max_files": MAX_FILES, "max_fields": MAX_FIELDS, "max_part_size": MAX_FIELD_BYTES}
                    self._form = await MemoryParser(self.headers, stream, **limits).parse()
            except MultiPartException as error:
                raise RequestError(400, f"cannot parse the form: {error.message}") from None
            names = [name for name, _ in self._form.multi_items()]
            repeated = next((name for name in names if names.count(name) > 1), None)
            if repeated is not None:
                raise RequestError(422, f"the form has {repeated[:80]!r} more than once: give each field once.")
            # FastAPI takes an empty field for one that was left out, and would answer another question
            empty = next((name for name, value in self._form.multi_items() if _is_empty(value)), None)
            if empty is not None:
                raise RequestError(422, f"{empty[:80]}: the field is empty, expected a value: fill it or leave it out.")
        return self._form


def _is_empty(value: UploadFile | str) -> bool:
    """Whether nothing was filled in: of a file, neither its name nor its content."""
    return not value if isinstance(value, str) else not value.filename and not value.size


class FormRoute(APIRoute):
    """A route that parses forms in memory."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_in_memory(request: Request) -> Response:
            memory_request = MemoryRequest(request.scope, request.receive)
            await memory_request.form()  # parsed here, because FastAPI would hide what is wrong with it
            return await handle(memory_request)

        return handle_in_memory
