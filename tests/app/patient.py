"""``vitrail`` whose server is patient with cancelled jobs: on a busy machine it would kill its worker after each."""

from __future__ import annotations

from functools import partial

from vitrail.app.server.settings import Settings
from vitrail.cli import serve
from vitrail.cli.program import main

SECONDS = 60

if __name__ == "__main__":
    serve.Settings = partial(Settings, stop_seconds=SECONDS)  # type: ignore[misc, assignment]
    main()
