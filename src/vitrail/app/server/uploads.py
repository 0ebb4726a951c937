"""Forms are read into memory: nothing of them is ever written to disk."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.datastructures import FormData
from starlette.formparsers import MultiPartException, MultiPartParser

from vitrail.app.server.errors import Refused

MOST_FIELDS = 24
FIELD_BYTES = 900_000


class MemoryParser(MultiPartParser):
    """Never moves a file to disk: bodies are bounded before they come here."""

    spool_max_size = 2**40


class MemoryRequest(Request):
    """A request whose form stays in memory."""

    async def _get_form(self, **_: Any) -> FormData:
        if self._form is None:
            if not self.headers.get("content-type", "").lower().startswith("multipart/form-data"):
                raise Refused(415, "expected a form (multipart/form-data): send the fields that way.")
            try:
                async with aclosing(self.stream()) as stream:
                    limits = {"max_files": 1, "max_fields": MOST_FIELDS, "max_part_size": FIELD_BYTES}
                    self._form = await MemoryParser(self.headers, stream, **limits).parse()
            except MultiPartException as error:
                raise Refused(400, f"the form cannot be read: {error.message}") from None
            refuse_repeated(self._form)
        return self._form


def refuse_repeated(form: FormData) -> None:
    names = [name for name, _ in form.multi_items()]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise Refused(422, f"the form has {twice[:80]!r} more than once: give each field once.")


class FormRoute(APIRoute):
    """A route that reads forms into memory."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_in_memory(request: Request) -> Response:
            mine = MemoryRequest(request.scope, request.receive)
            await mine.form()  # here, where what is wrong with it can still be said: FastAPI would hide it
            return await handle(mine)

        return handle_in_memory
