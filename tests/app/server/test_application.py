"""``vitrail serve`` starts and stops cleanly."""

from __future__ import annotations

import io
import signal
import sys
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch
from PIL import Image
from tests.app.serving import CAT, PATIENCE, events, form, subprocess_server, until, upload
from typer.testing import CliRunner

import vitrail
from vitrail.cli.program import app as command

OTHER_LOOPBACK = "127.0.0.2" if sys.platform == "linux" else "127.0.0.1"


@pytest.mark.parametrize(
    ("sign", "host"),
    [
        (signal.SIGTERM, OTHER_LOOPBACK),
        pytest.param(signal.SIGINT, "127.0.0.1", marks=pytest.mark.full),
        pytest.param(signal.SIGKILL, "localhost", marks=pytest.mark.full),
    ],
)
def test_a_signal_ends_all_processes(tmp_path: Path, sign: signal.Signals, host: str) -> None:
    """Also during a job whose events a client follows, and on any loopback address."""
    with subprocess_server(tmp_path / "log", "--model", "scenes", "--token", "abc", "--host", host) as server:
        assert host in server.url
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
        if sign is not signal.SIGKILL:
            assert server.process.returncode == 0


def test_weights_from_a_file_can_be_served(tmp_path: Path) -> None:
    """A fine-tuned timm model with other classes."""
    module = timm.create_model("vit_tiny_patch16_224", num_classes=3, img_size=64)
    safetensors.torch.save_file(module.state_dict(), tmp_path / "mine.safetensors")
    (tmp_path / "names.txt").write_text("ash\nbeech\noak\n")
    options = ("--model", "vit_tiny_patch16_224", "--checkpoint", str(tmp_path / "mine.safetensors"),
               "--labels", str(tmp_path / "names.txt"), "--num-classes", "3", "--img-size", "64")  # fmt: skip
    with subprocess_server(tmp_path / "log", *options) as server, server.client() as client:
        (row,) = client.get("/api/models").json()
        assert row["labels"] == ["ash", "beech", "oak"]
        assert row["input"] == [64, 64]
        classes = client.post("/api/predict", files=upload()).json()["classes"]
    with torch.no_grad():
        view = vitrail.wrap(module.eval(), labels=["ash", "beech", "oak"])
        pixels = view.preprocess(Image.open(io.BytesIO(CAT)).convert("RGB"))[None]
        expected = view.probabilities(view.logits(pixels))[0]
    assert {row["label"]: row["probability"] for row in classes} == pytest.approx(
        dict(zip(view.labels, expected.tolist(), strict=True)), rel=1e-3
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--checkpoint", "a.pt"], "--checkpoint must go with exactly one --model, but got none."),
        (["--model", "photo,scenes", "--labels", "names.txt", "--num-classes", "2"],
         "--labels and --num-classes must go with exactly one --model, but got 2 models."),
        pytest.param(["--model", "vit_tiny_patch16_224", "--checkpoint", "missing.pt", "--port", "0"], "missing.pt",
                     marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_what_is_wrong_with_weights_is_one_sentence(options: list[str], message: str) -> None:
    result = CliRunner().invoke(command, ["serve", *options])
    assert isinstance(result.exception, vitrail.VitrailError)
    assert message in str(result.exception)


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
