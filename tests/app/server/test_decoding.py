"""Malicious and malformed uploads get an error message and leave the server unharmed."""

from __future__ import annotations

import asyncio
import io

import httpx
import numpy as np
import pytest
from PIL import Image
from tests.app.server.hostile import Hostile, all_uploads, photo, png, saved, zeros
from tests.app.serving import CAT, Served, until, upload

from vitrail.app.server.decoding import Decoder, decode
from vitrail.app.server.responses import RequestError
from vitrail.app.server.settings import Settings
from vitrail.data.images import read_image

CACHE = 256 * 2**20  # what the server may keep, some large pictures among it
FLAT = 16 * 2**20


def send(client: httpx.Client, hostile: Hostile) -> httpx.Response:
    return client.post("/api/predict", files=upload(hostile.data, hostile.filename, hostile.kind))


def test_hostile_uploads_get_an_error_and_leave_nothing_behind(served: Served, client: httpx.Client) -> None:
    uploads = all_uploads()
    assert len(uploads) >= 200
    wrong, before = [], served.rss()
    for hostile in uploads:
        answer = send(client, hostile)
        if answer.status_code not in hostile.allowed:
            wrong.append((hostile.name, answer.status_code, answer.text[:200]))
        elif answer.status_code != 200:
            message = answer.json()["error"]
            assert message.endswith("."), (hostile.name, message)
    assert not wrong
    assert client.post("/api/predict", files=upload()).status_code == 200
    until(lambda: served.rss() - before < CACHE)
    before = served.rss()
    refused = [hostile for hostile in uploads if 200 not in hostile.allowed]
    large = [hostile for hostile in refused if "promise" in hostile.name or "bomb" in hostile.name]
    for hostile in (*large, *refused[::4]):  # again: memory does not grow
        assert 400 <= send(client, hostile).status_code < 500
    until(lambda: served.rss() - before < FLAT)


def test_valid_uploads_are_decoded_as_the_library_does() -> None:
    for hostile in all_uploads():
        if hostile.allowed == {200}:
            image, media_type = decode(hostile.data, 40_000_000)
            assert media_type.startswith("image/")
            if image.width < 1000:
                expected = read_image(Image.open(io.BytesIO(hostile.data)))
                np.testing.assert_array_equal(np.asarray(image), np.asarray(expected))


async def decoded(settings: Settings, *uploads: bytes) -> list[object]:
    """The results of a decoder for several uploads: sizes or statuses."""
    decoder, results = Decoder(settings), []
    decoder.start()
    try:
        for data in uploads:
            try:
                results.append((await decoder.decode(data)).size)
            except RequestError as error:
                results.append(error.status)
    finally:
        child = decoder.stop()
        if child is not None:
            await asyncio.to_thread(child.join)
    return results


SMALL = saved(photo(), "PNG")
LARGE = png(6_000, 6_000, 8, 2, rows=zeros(6_000, 6_000, 24))


def test_a_picture_that_takes_too_long_is_given_up_and_the_next_is_read() -> None:
    assert asyncio.run(decoded(Settings(decode_seconds=0.05), LARGE, SMALL)) == [422, (48, 40)]


def test_a_picture_that_needs_too_much_memory_is_refused_and_the_next_is_read() -> None:
    assert asyncio.run(decoded(Settings(decode_bytes=420 * 2**20), LARGE, SMALL)) in ([413, (48, 40)], [422, (48, 40)])


def test_a_decoder_that_dies_is_started_again() -> None:
    async def killed() -> tuple[int, tuple[int, int]]:
        decoder = Decoder(Settings())
        decoder.start()
        await decoder.decode(SMALL)
        assert decoder._child is not None
        first = decoder._child
        first.process.kill()
        await asyncio.to_thread(first.join)
        try:
            await decoder.decode(LARGE)
        except RequestError as error:
            status = error.status
        else:
            status = 200
        decoded = await decoder.decode(SMALL)
        child = decoder.stop()
        assert child is not None
        await asyncio.to_thread(child.join)
        return status, decoded.size

    status, size = asyncio.run(killed())
    assert status in (200, 422)
    assert size == (48, 40)


def test_too_many_pictures_at_once_are_told_to_come_again() -> None:
    async def crowd() -> list[object]:
        decoder = Decoder(Settings(queue=2))
        decoder.start()
        tasks = [asyncio.create_task(decoder.decode(SMALL)) for _ in range(6)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        child = decoder.stop()
        assert child is not None
        await asyncio.to_thread(child.join)
        return results

    results = asyncio.run(crowd())
    refused = [result for result in results if isinstance(result, RequestError)]
    assert len(refused) == 4
    assert all(error.status == 429 and error.retry_after for error in refused)


@pytest.mark.parametrize("sent", [b"", CAT])
def test_an_unreadable_form_is_told(client: httpx.Client, sent: bytes) -> None:
    for kind in ("multipart/form-data", "multipart/form-data; boundary=x", "application/json", "text/plain", ""):
        answer = client.post("/api/predict", content=sent, headers={"Content-Type": kind})
        assert answer.status_code in (400, 415, 422), kind
        assert answer.json()["error"]
