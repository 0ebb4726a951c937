"""The application and the web server that runs it."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles

from vitrail.app.server.responses import RequestError
from vitrail.app.server.routes import PAGE, catalogue_routes, job_routes, page_routes, task_routes
from vitrail.app.server.schemas import describe_error
from vitrail.app.server.security import Guard, error_response
from vitrail.app.server.service import Service
from vitrail.app.server.settings import Settings
from vitrail.version import __version__


class Server(uvicorn.Server):
    """Stops at Ctrl-C without waiting for jobs: whoever follows one is told that it was cancelled."""

    def __init__(self, settings: Settings, models: list[str]) -> None:
        app = create_app(settings, models)
        self.service: Service = app.state.service
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,  # for the privacy of clients
                server_header=False,
                lifespan="on",
                ws="none",
                timeout_graceful_shutdown=5,
            )
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.service.dispatcher.cancel_all()
        await super().shutdown(sockets)


def create_app(settings: Settings, models: list[str]) -> FastAPI:
    """The application; its processes start with its lifespan, or earlier with ``app.state.service.start()``."""
    service = Service(settings, models)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        yield
        await service.stop()

    app = FastAPI(
        title="vitrail",
        version=__version__,
        description="See through any Vision Transformer.",
        lifespan=lifespan,
        openapi_url="/api/openapi.json",
        docs_url=None,  # Swagger UI needs scripts from a CDN; reference.py renders /api/docs
        redoc_url=None,
    )
    app.state.service = service
    app.add_middleware(Guard, settings=settings)
    for kind in (RequestError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, _describe)
    for routes in (catalogue_routes, task_routes, job_routes, page_routes):
        app.include_router(routes(service))
    app.mount("/static", StaticFiles(directory=str(PAGE)), name="static")
    return app


async def _describe(_: Request, error: Exception) -> Response:
    """The error as JSON with a sentence."""
    if isinstance(error, HTTPException):
        return JSONResponse({"error": f"{error.detail}."}, error.status_code, error.headers)
    if isinstance(error, RequestValidationError):
        error = RequestError(422, describe_error(error.errors()[0]))
    assert isinstance(error, RequestError)
    return error_response(error)
