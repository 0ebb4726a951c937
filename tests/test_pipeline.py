"""Work ahead of its consumer: the results, order, errors and pixels of doing one thing after another, in threads."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.helpers import state_of

import vitrail
from vitrail import VitrailError
from vitrail.api import explain_each, see, see_ahead
from vitrail.bench.plan import ModelSpec, Plan
from vitrail.bench.run import ModelRun
from vitrail.data import DataSet, Example, InMemory
from vitrail.data.images import read_image
from vitrail.methods.registry import build_method
from vitrail.models.view import View
from vitrail.pipeline import BATCHES, ahead

TIMEOUT = 60.0  # of waiting for another thread, never reached


@pytest.fixture(scope="module")
def view() -> View:
    return vitrail.load("scenes")


@pytest.fixture(autouse=True)
def two_threads_and_none_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("vitrail.pipeline.threads", lambda: 2)  # on a machine of one core, too
    yield
    assert not ours()


def photographs(folder: Path, count: int) -> list[Path]:
    """JPEG and PNG files of different sizes, some of them turned, grey or transparent."""
    dice = np.random.default_rng(0)
    paths = []
    for number in range(count):
        height, width = (int(edge) for edge in dice.integers(40, 90, 2))
        mode, channels = [("RGB", 3), ("L", 1), ("RGBA", 4)][number % 3]
        pixels = dice.integers(0, 256, (height, width, channels), dtype=np.uint8).squeeze()
        path = folder / f"{number:02}.{'png' if mode == 'RGBA' else 'jpg'}"
        exif = Image.Exif()
        exif[0x0112] = 1 + number % 8
        Image.fromarray(pixels, mode).save(path, exif=exif)
        paths.append(path)
    return paths


def ours() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("vitrail-ahead")]


def test_results_come_in_order_whichever_task_ends_first() -> None:
    ended = threading.Event()

    def first() -> int:
        assert ended.wait(TIMEOUT)
        return 1

    def second() -> int:
        ended.set()
        return 2

    assert [task.result() for task in ahead([first, second], 2)] == [1, 2]


def test_tasks_run_beside_their_consumer() -> None:
    idents = {task.result() for task in ahead([threading.get_ident] * 20, 4)}
    assert threading.get_ident() not in idents
    assert [task.result() for task in ahead([threading.get_ident], 1)] == [threading.get_ident()]


@pytest.mark.parametrize("most", [1, 2, 5])
def test_never_more_tasks_than_allowed_have_begun_and_wait(most: int) -> None:
    drawn = 0

    def tasks() -> Iterator[Callable[[], int]]:
        nonlocal drawn
        for number in range(30):
            drawn += 1
            yield partial(int, number)

    kept = []
    for ended, task in enumerate(ahead(tasks(), most)):
        kept.append(drawn - ended)
        assert task.result() == ended
    assert max(kept) == most
    assert kept[0] == most, "as many as allowed are kept going"


class AtOnce(ThreadPoolExecutor):
    """A pool whose tasks have ended as soon as they are submitted."""

    def submit(self, task: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = super().submit(task, *args, **kwargs)
        wait([future])
        return future


@pytest.mark.parametrize(
    ("eager", "expected"),
    [(True, "draw 0 get 0 draw 1 get 1 draw 2 get 2"), (False, "draw 0 draw 1 get 0 draw 2 get 1 get 2")],
)
def test_an_eager_consumer_gets_a_result_before_the_next_task_is_drawn(
    eager: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitrail.pipeline.ThreadPoolExecutor", AtOnce)
    events: list[str] = []

    def tasks() -> Iterator[Callable[[], int]]:
        for number in range(3):
            events.append(f"draw {number}")
            yield partial(int, number)

    for task in ahead(tasks(), 2, eager=eager):
        events.append(f"get {task.result()}")
    assert " ".join(events) == expected


def test_errors_come_at_their_turn_and_the_rest_goes_on() -> None:
    def work(number: int) -> int:
        if number == 3:
            raise VitrailError("the fourth")
        return number

    answers: list[object] = []
    for task in ahead((partial(work, number) for number in range(6)), 6):
        try:
            answers.append(task.result())
        except VitrailError as error:
            answers.append(str(error))
    assert answers == [0, 1, 2, "the fourth", 4, 5]


def test_an_error_of_what_draws_the_tasks_ends_the_work() -> None:
    def tasks() -> Iterator[Callable[[], int]]:
        yield partial(int, 0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        list(ahead(tasks(), 4))
    assert not ours(), caught


def test_closing_early_starts_nothing_more_and_leaves_no_thread() -> None:
    begun: list[int] = []
    with closing(ahead((partial(begun.append, number) for number in range(1000)), 8)) as tasks:
        next(tasks).result()
        assert ours()
    assert not ours()
    assert len(begun) <= 8


@pytest.mark.parametrize("kind", ["paths", "images", "opened", "arrays"])
def test_images_are_seen_ahead_as_they_are_alone(kind: str, view: View, tmp_path: Path) -> None:
    paths = photographs(tmp_path, 24)
    make: dict[str, Callable[[Path], Any]] = {
        "paths": str,
        "images": read_image,
        "opened": Image.open,
        "arrays": lambda path: np.asarray(read_image(path)),
    }
    alone = [see(view, make[kind](path)) for path in paths]
    together = list(see_ahead(view, [make[kind](path) for path in paths], 8))
    for ours, expected in zip(together, alone, strict=True):
        assert torch.equal(ours.pixels, expected.pixels)
        assert ours.image.tobytes() == expected.image.tobytes()
        assert (ours.path, ours.box) == (expected.path, expected.box)


def test_one_opened_file_many_times_is_decoded_once_and_whole(view: View, tmp_path: Path) -> None:
    (path,) = photographs(tmp_path, 1)
    expected = see(view, path).pixels
    with Image.open(path) as opened:
        assert all(torch.equal(seen.pixels, expected) for seen in see_ahead(view, [opened] * 40, 20))


def test_pixels_are_those_of_torch(view: View) -> None:
    """NumPy's arithmetic, which uses no threads, rounds as torch's."""
    steps = view.preprocessing
    values = np.arange(256, dtype=np.uint8).reshape(16, 16, 1).repeat(3, 2)
    image = Image.fromarray(values).resize(steps.size[::-1], Image.Resampling.NEAREST)
    colours = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
    mean, std = (torch.tensor(triple).view(3, 1, 1) for triple in (steps.mean, steps.std))
    assert torch.equal(view.preprocess(image), (colours - mean) / std)


def test_explanations_of_a_list_equal_those_of_its_batches(view: View, tmp_path: Path) -> None:
    paths = photographs(tmp_path, 10)
    together = vitrail.explain(view, paths, batch_size=4)
    apart = [ex for start in (0, 4, 8) for ex in vitrail.explain(view, paths[start : start + 4], batch_size=4)]
    for ours, expected in zip(together, apart, strict=True):
        assert torch.equal(ours.map, expected.map)
        assert (ours.target, ours.probability, ours.top) == (expected.target, expected.probability, expected.top)
        assert ours.image_path == expected.image_path


def test_a_broken_file_is_reported_after_the_batches_before_it(view: View, tmp_path: Path, forwards: list[int]) -> None:
    paths = photographs(tmp_path, 8)
    paths[5].write_bytes(b"no image")
    explained: list[str | None] = []
    explanations = explain_each(build_method("gradient", view), paths, None, None, batch_size=2)
    with pytest.raises(VitrailError, match=r"05\.png' is not an image") as caught:
        explained.extend(explanation.image_path for explanation in explanations)
    assert explained == [str(path) for path in paths[:4]]
    assert not ours(), caught
    assert sum(forwards) == 4, "what comes after is not computed"


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_nothing_is_left_after_an_interrupt_in_the_middle(
    interrupt: type[BaseException], view: View, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, before, calls = photographs(tmp_path, 12), state_of(view.module), 0
    stacked = View.stacked

    def interrupted(self: View, images: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            assert ours()
            raise interrupt
        return stacked(self, images)

    monkeypatch.setattr(View, "stacked", interrupted)
    with pytest.raises(interrupt) as caught:
        vitrail.explain(view, paths, batch_size=2)
    assert not ours(), caught  # although the traceback keeps every frame
    calls = 0
    with pytest.raises(interrupt) as caught:
        vitrail.evaluate(view, paths, metrics="insertion(steps=2)", batch_size=2)
    assert not ours(), caught
    after = state_of(view.module)
    assert all(torch.equal(tensor, after["tensors"][name]) for name, tensor in before["tensors"].items())


def test_a_closed_generator_leaves_no_thread(view: View, tmp_path: Path) -> None:
    explanations = explain_each(build_method("gradient", view), photographs(tmp_path, 12), None, None, batch_size=2)
    next(explanations)
    assert ours()
    explanations.close()
    assert not ours()


def test_few_images_are_alive_at_once(view: View, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size, alive, most, lock = 2, 0, 0, threading.RLock()

    def gone() -> None:
        nonlocal alive
        with lock:
            alive -= 1

    def counting(source: Any) -> Image.Image:
        nonlocal alive, most
        image = read_image(source)
        weakref.finalize(image, gone)
        with lock:
            alive += 1
            most = max(most, alive)
        return image

    monkeypatch.setattr("vitrail.api.read_image", counting)
    monkeypatch.setattr("vitrail.data.memory.read_image", counting)
    paths = photographs(tmp_path, 40)
    deque(explain_each(build_method("gradient", view), paths, None, None, batch_size=size), maxlen=0)
    # those read ahead, the batch that is explained, and what its explanations still hold while the next is put together
    assert size < most <= (BATCHES + 2) * size
    gc.collect()
    assert not alive
    most = 0
    vitrail.evaluate(view, paths, "gradient", "insertion(steps=2)", batch_size=size)
    assert size < most <= (BATCHES + 2) * size


class Careful(DataSet):
    """A data set that says nothing of threads, with an image that cannot be read."""

    def __init__(self, images: list[Path]) -> None:
        self.images, self.readers = images, set[int]()

    @property
    def ids(self) -> list[str]:
        return [path.name for path in self.images]

    def load(self, position: int) -> Example:
        self.readers.add(threading.get_ident())
        if position == 3:
            raise VitrailError("the fourth is lost.")
        return Example(self.ids[position], read_image(self.images[position]))


def test_a_data_set_that_says_nothing_of_threads_is_read_in_that_of_the_caller(view: View, tmp_path: Path) -> None:
    data = Careful(photographs(tmp_path, 7))
    with pytest.warns(UserWarning, match="1 of 7 images were left out; the first: the fourth is lost"):
        rows = vitrail.evaluate(view, data, "gradient", "insertion(steps=2)", batch_size=2)
    assert data.readers == {threading.get_ident()}
    kept = [number for number in range(7) if number != 3]
    listed = InMemory([Example(data.ids[i], read_image(data.images[i])) for i in kept])
    expected = vitrail.evaluate(view, listed, "gradient", "insertion(steps=2)", batch_size=2)
    assert rows["image"].tolist() == expected["image"].tolist() == [data.ids[i] for i in kept]
    with pytest.raises(VitrailError, match="the fourth is lost"):
        vitrail.evaluate(view, data, "gradient", "insertion(steps=2)", batch_size=2, strict=True)


class Watched:
    """An opened file that tells whether it is decoded in two threads at once."""

    def __init__(self, path: Path) -> None:
        self.image, self.read, self.overlap, self.busy = Image.open(path), threading.Event(), False, threading.Lock()
        self.load = self.image.load
        self.image.load = self.loaded

    def loaded(self) -> Any:
        if not self.busy.acquire(blocking=False):
            self.overlap = True
            return self.load()
        try:
            assert self.read.wait(TIMEOUT), "another example holds the same image"
            return self.load()
        finally:
            self.busy.release()


class Shared(DataSet):
    """Two examples of one opened file."""

    ids = property(lambda self: ["left", "right"])

    def __init__(self, path: Path, concurrent: bool) -> None:
        self.concurrent, self.watched = concurrent, Watched(path)
        if not concurrent:
            self.watched.read.set()  # the caller decodes the one before it reads the other

    def load(self, position: int) -> Example:
        if position == 1:
            self.watched.read.set()
        return Example(self.ids[position], self.watched.image, position)


@pytest.mark.parametrize("concurrent", [True, False])
def test_one_opened_file_in_two_examples_is_decoded_once_and_whole(
    concurrent: bool, view: View, tmp_path: Path
) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    path = tmp_path / "large.jpg"
    Image.fromarray(noise).resize((1800, 1200)).save(path)  # takes a while to decode
    alone = InMemory([Example(name, read_image(path), label) for label, name in enumerate(["left", "right"])])
    asked = ("gradient", "insertion(steps=2)")
    expected = vitrail.evaluate(view, alone, *asked, target="label")["value"]
    data = Shared(path, concurrent)
    assert vitrail.evaluate(view, data, *asked, target="label")["value"].tolist() == expected.tolist()
    assert not data.watched.overlap
    data = Shared(path, concurrent)
    plan = Plan([ModelSpec("scenes")], "scenes:2", ["gradient"], ["insertion(steps=2)"], target="label", batch_size=2)
    run = ModelRun(plan, "scenes", view, data)
    run.measure(None, {})
    assert [row["value"] for row in run.buffer.rows] == expected.tolist()
    assert not data.watched.overlap


def test_an_opened_file_that_is_truncated_is_left_out(view: View, tmp_path: Path) -> None:
    paths = photographs(tmp_path, 2)
    paths[0].write_bytes(paths[0].read_bytes()[:-200])
    data = InMemory([Example(paths[0].name, Image.open(paths[0])), Example(paths[1].name, read_image(paths[1]))])
    with pytest.warns(UserWarning, match=r"1 of 2 images were left out; the first: .* truncated or corrupt"):
        rows = vitrail.evaluate(view, data, "gradient", "sparseness")
    assert rows["image"].tolist() == [paths[1].name]


def test_a_run_reads_ahead_and_stores_the_same_rows(view: View, tmp_path: Path) -> None:
    paths = photographs(tmp_path, 9)
    paths[4].write_bytes(b"no image")
    plan = Plan([ModelSpec("scenes")], "scenes:9", ["gradient"], ["insertion(steps=2)"], batch_size=2)
    files, careful = InMemory(paths), InMemory(paths)
    careful.concurrent = False
    runs = [ModelRun(plan, "scenes", view, data) for data in (files, careful)]
    for run in runs:
        run.measure(None, {})
    rows = [{row["image"]: (row["value"], row["key"], row.get("error")) for row in run.buffer.rows} for run in runs]
    assert rows[0].keys() == rows[1].keys() == set(files.ids)
    for name, (value, key, error) in rows[0].items():
        np.testing.assert_equal((value, key, error), rows[1][name])
    assert "is not an image" in rows[0][files.ids[4]][2]
    assert (runs[0].outcome.images, runs[0].outcome.errors) == (8, 1)


def test_warnings_are_those_of_the_caller_in_order(view: View, tmp_path: Path) -> None:
    paths = []
    for number, size in enumerate([(3, 3), (60, 60), (5, 5), (900, 20)]):
        paths.append(tmp_path / f"{number}.png")
        Image.new("RGB", size).save(paths[-1])
    threads = []

    def note(message: Any, *_: Any) -> None:
        threads.append((threading.get_ident(), str(message).partition(":")[0]))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        list(see_ahead(view, paths, 4))
    assert threads == [(threading.get_ident(), name) for name in ("0.png", "2.png", "3.png")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=r"0\.png"):
            list(see_ahead(view, paths, 4))


def test_threads_leave_the_filters_of_warnings_alone(view: View, tmp_path: Path) -> None:
    """They belong to the process: two threads that save and restore them can leave those of the other behind."""
    paths, filters = photographs(tmp_path, 12), warnings.filters
    seen = []
    with closing(see_ahead(view, paths, 6)) as reading:
        for _ in reading:
            seen.append(warnings.filters is filters)
    assert all(seen)
