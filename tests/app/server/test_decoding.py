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

UPLOADS = all_uploads()
CACHE = 256 * 2**20  # what the server may keep: three of them are large pictures, which stay for a while
FLAT = 16 * 2**20


def send(client: httpx.Client, one: Hostile) -> httpx.Response:
    return client.post("/api/predict", files=upload(one.data, one.filename, one.kind))


def test_there_are_enough() -> None:
    assert len(UPLOADS) >= 200


def test_every_hostile_upload_gets_a_sentence(served: Served, client: httpx.Client) -> None:
    wrong, before = [], served.rss()
    for one in UPLOADS:
        answer = send(client, one)
        if answer.status_code not in one.allowed:
            wrong.append((one.name, answer.status_code, answer.text[:200]))
        elif answer.status_code != 200:
            sentence = answer.json()["error"]
            assert sentence.endswith("."), (one.name, sentence)
    assert not wrong
    assert client.post("/api/predict", files=upload()).status_code == 200
    until(lambda: served.rss() - before < CACHE)


def test_again_and_again_nothing_grows(served: Served, client: httpx.Client) -> None:
    bad = [one for one in UPLOADS if 200 not in one.allowed]
    for one in bad:
        send(client, one)
    before = served.rss()
    for _ in range(2):
        for one in bad:
            assert 400 <= send(client, one).status_code < 500
    until(lambda: served.rss() - before < FLAT)


def test_what_is_fine_is_read_as_the_library_reads_it() -> None:
    for one in UPLOADS:
        if one.allowed == {200}:
            image, kind = decode(one.data, 40_000_000)
            assert kind.startswith("image/")
            if image.width < 1000:
                ours, theirs = (np.asarray(i) for i in (image, read_image(Image.open(io.BytesIO(one.data)))))
                np.testing.assert_array_equal(ours, theirs)


async def decoded(settings: Settings, *uploads: bytes) -> list[object]:
    """What a decoder says to one upload after another: a size, or a status."""
    decoder, found = Decoder(settings), []
    decoder.start()
    try:
        for data in uploads:
            try:
                found.append((await decoder.decode(data)).size)
            except RequestError as error:
                found.append(error.status)
    finally:
        child = decoder.stop()
        if child is not None:
            await asyncio.to_thread(child.join)
    return found


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
        found = await decoder.decode(SMALL)
        child = decoder.stop()
        assert child is not None
        await asyncio.to_thread(child.join)
        return status, found.size

    status, size = asyncio.run(killed())
    assert status in (200, 422)
    assert size == (48, 40)


def test_too_many_pictures_at_once_are_told_to_come_again() -> None:
    async def crowd() -> list[object]:
        decoder = Decoder(Settings(queue=2))
        decoder.start()
        tasks = [asyncio.create_task(decoder.decode(SMALL)) for _ in range(6)]
        found = await asyncio.gather(*tasks, return_exceptions=True)
        child = decoder.stop()
        assert child is not None
        await asyncio.to_thread(child.join)
        return found

    found = asyncio.run(crowd())
    refused = [one for one in found if isinstance(one, RequestError)]
    assert len(refused) == 4
    assert all(one.status == 429 and one.retry_after for one in refused)


@pytest.mark.parametrize("sent", [b"", CAT])
def test_an_unreadable_form_is_told(client: httpx.Client, sent: bytes) -> None:
    for kind in ("multipart/form-data", "multipart/form-data; boundary=x", "application/json", "text/plain", ""):
        answer = client.post("/api/predict", content=sent, headers={"Content-Type": kind})
        assert answer.status_code in (400, 415, 422), kind
        assert answer.json()["error"]
