"""The web server around the application."""

from __future__ import annotations

import socket

import uvicorn

from vitrail.app.server.application import create_app
from vitrail.app.server.settings import Settings


class Server(uvicorn.Server):
    """Ends at Ctrl-C without waiting for jobs: whoever follows one hears that it was cancelled."""

    def __init__(self, settings: Settings, models: list[str]) -> None:
        app = create_app(settings, models)
        self.service = app.state.service
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,  # who asks for which picture is nobody's business
                server_header=False,
                lifespan="on",
                ws="none",
                timeout_graceful_shutdown=5,
            )
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.service.let_go()
        await super().shutdown(sockets)
