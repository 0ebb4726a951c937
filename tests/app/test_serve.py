"""``vitrail serve`` begins and ends cleanly."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from tests.app.serving import PATIENCE, events, form, subprocess_server, until


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_all_processes(tmp_path: Path, sign: signal.Signals) -> None:
    """Also with a job that runs and somebody who follows it."""
    with subprocess_server(tmp_path / "log", "--model", "scenes", "--token", "abc") as server:
        assert server.process is not None
        processes = server.processes()
        assert len(processes) >= 3
        with server.client(headers={"Authorization": "Bearer abc"}) as client:
            fields = form(sample="cat", method="rise", params={"masks": 400_000}, wait=False)
            job = client.post("/api/explain", files=fields).json()
            with client.stream("GET", job["events"]) as stream:
                heard = events(stream)
                next(name for name, _ in heard if name == "progress")
                server.process.send_signal(sign)
                if sign is not signal.SIGKILL:
                    assert list(heard)[-1][0] == "cancelled"
        server.process.wait(PATIENCE)
        until(lambda: not any(alive(pid) for pid in processes))
        assert server.log is not None
        assert server.log.read_text() == ""  # neither a traceback nor the token
        if sign is signal.SIGINT:
            assert server.process.returncode == 0


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
