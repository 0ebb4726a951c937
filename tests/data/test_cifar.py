"""CIFAR: both versions give the same pictures, and no pickle runs code."""

import os
import pickle
import struct

import numpy as np
import pytest
from tests.data.layouts import text

from vitrail.data import Cifar
from vitrail.errors import VitrailError

RANDOM = np.random.default_rng(0)
PIXELS = RANDOM.integers(0, 256, (6, 3072), dtype=np.uint8)
LABELS = [3, 8, 0, 9, 1, 3]
FINE, COARSE = [99, 0, 57, 3, 41, 8], [19, 0, 5, 3, 4, 8]


def python_2_pickle(content):
    """What Python 2 wrote with protocol 2: texts are byte strings, arrays come from numpy.core."""

    def dump(value):
        if isinstance(value, bytes):
            return b"T" + struct.pack("<i", len(value)) + value
        if isinstance(value, int):
            return b"J" + struct.pack("<i", value)
        if isinstance(value, list):
            return b"](" + b"".join(map(dump, value)) + b"e"
        if isinstance(value, dict):
            return b"}(" + b"".join(dump(key) + dump(item) for key, item in value.items()) + b"u"
        shape = b"(" + b"".join(map(dump, map(int, value.shape))) + b"t"
        made = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
        kind = b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        return made + b"(K\x01" + shape + kind + b"\x89" + dump(value.tobytes()) + b"tb"

    return b"\x80\x02" + dump(content) + b"."


def write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def cifar10_binary(root):
    folder = root / "cifar-10-batches-bin"
    for name in ("test_batch", *(f"data_batch_{number}" for number in range(1, 6))):
        records = np.concatenate([np.array(LABELS, np.uint8)[:, None], PIXELS], axis=1)
        write(folder / f"{name}.bin", records.tobytes())
    text(folder / "batches.meta.txt", "\n".join(f"class{number}" for number in range(10)) + "\n\n")


def cifar10_python(root, dump=python_2_pickle):
    folder = root / "cifar-10-batches-py"
    for name in ("test_batch", *(f"data_batch_{number}" for number in range(1, 6))):
        write(folder / name, dump({b"labels": LABELS, b"data": PIXELS, b"filenames": [b"a.png"] * 6}))
    write(folder / "batches.meta", dump({b"label_names": [b"class%d" % number for number in range(10)]}))


def check(data, labels):
    assert [example.label for example in data] == labels
    assert data.ids[:2] == ["test/00000", "test/00001"]
    for example, row in zip(data, PIXELS, strict=True):
        assert np.array_equal(np.asarray(example.image), row.reshape(3, 32, 32).transpose(1, 2, 0))


def test_cifar10_binary(tmp_path):
    cifar10_binary(tmp_path)
    data = Cifar(tmp_path)
    check(data, LABELS)
    assert (data.name, list(data.labels)) == ("cifar10", [f"class{number}" for number in range(10)])
    assert Cifar(tmp_path / "cifar-10-batches-bin").ids == data.ids
    train = Cifar(tmp_path, split="train")
    assert (len(train), train[29].label, train.ids[29]) == (30, 3, "train/00029")


def python_3_pickle(content):
    return pickle.dumps(content, protocol=2)


@pytest.mark.parametrize("dump", [python_2_pickle, python_3_pickle, pickle.dumps])
def test_cifar10_python(tmp_path, dump):
    cifar10_python(tmp_path, dump)
    data = Cifar(tmp_path)
    check(data, LABELS)
    assert list(data.labels) == [f"class{number}" for number in range(10)]
    assert len(Cifar(tmp_path, split="train")) == 30


def test_our_python_2_pickle_is_one():
    assert pickle.loads(python_2_pickle({b"labels": LABELS, b"x": [b"y"]}), encoding="bytes") == {
        b"labels": LABELS,
        b"x": [b"y"],
    }


def test_cifar100(tmp_path):
    head = np.stack([COARSE, FINE], axis=1).astype(np.uint8)
    names = [f"class{number}" for number in range(100)]
    write(tmp_path / "bin" / "cifar-100-binary" / "test.bin", np.concatenate([head, PIXELS], axis=1).tobytes())
    text(tmp_path / "bin" / "cifar-100-binary" / "fine_label_names.txt", "\n".join(names))
    content = {b"fine_labels": FINE, b"coarse_labels": COARSE, b"data": PIXELS}
    write(tmp_path / "py" / "cifar-100-python" / "test", python_2_pickle(content))
    write(
        tmp_path / "py" / "cifar-100-python" / "meta",
        python_2_pickle({b"fine_label_names": [n.encode() for n in names]}),
    )
    for root in ("bin", "py"):
        data = Cifar(tmp_path / root, classes=100)
        check(data, FINE)
        assert (data.name, list(data.labels)) == ("cifar100", names)


def test_binary_is_preferred(tmp_path):
    cifar10_binary(tmp_path)
    write(tmp_path / "cifar-10-batches-py" / "test_batch", b"broken")
    check(Cifar(tmp_path), LABELS)


def test_names_are_optional(tmp_path):
    cifar10_binary(tmp_path)
    (tmp_path / "cifar-10-batches-bin" / "batches.meta.txt").unlink()
    assert Cifar(tmp_path).labels is None


class Evil:
    def __init__(self, call, *arguments):
        self.call, self.arguments = call, arguments

    def __reduce__(self):
        return self.call, self.arguments


@pytest.mark.parametrize("protocol", range(5))
@pytest.mark.parametrize(
    ("call", "argument"),
    [(os.system, "touch {}"), (eval, "open({!r}, 'w')"), (exec, "open({!r}, 'w')"), (os.mkdir, "{}"), (open, "{}")],
)
def test_pickles_cannot_run_code(tmp_path, protocol, call, argument):
    trace = tmp_path / "trace"
    arguments = [argument.format(str(trace))] + (["w"] if call is open else [])
    bomb = pickle.dumps({b"labels": LABELS, b"data": PIXELS, b"x": Evil(call, *arguments)}, protocol)
    write(tmp_path / "test_batch", bomb)
    with pytest.raises(VitrailError, match=r"test_batch' cannot be read: refused as a pickle \(it asks for"):
        Cifar(tmp_path)
    assert not trace.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02cnumpy\nload\n.",
        b"\x80\x04\x8c\x05numpy\x8c\x0fndarray.tofile\x93.",
        b"\x80\x02cnumpy\nndarray\n}U\x01aK\x01sb.",
        b"\x80\x02c_codecs\nencode\nN}U\x01aK\x01s\x86b.",
        b"\x80\x02c_codecs\nencode\n(X\x01\x00\x00\x00aX\x05\x00\x00\x00rot13tR.",
        b"\x80\x02(lp0\n",
        b"",
        b"\x80\x02K\x05.",
        b"\x80\x02Pexternal\n.",
    ],
)
def test_odd_pickles_are_refused(tmp_path, data):
    write(tmp_path / "test_batch", data)
    with pytest.raises(VitrailError, match="test_batch' cannot be read"):
        Cifar(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({b"labels": LABELS}, "expected a list of labels and an array"),
        ({b"labels": [b"a"] * 6, b"data": PIXELS}, "expected a list of labels and an array"),
        ({b"labels": LABELS[1:], b"data": PIXELS}, "5 labels and pixels"),
        ({b"labels": [10] * 6, b"data": PIXELS}, "it has label 10, expected 0…9"),
        ({b"labels": LABELS, b"data": PIXELS.astype(np.float32)}, "not an array of bytes"),
        ({b"labels": LABELS, b"data": np.array([None])}, "not an array of bytes"),
    ],
)
def test_wrong_contents(tmp_path, content, message):
    write(tmp_path / "test_batch", python_3_pickle(content))
    with pytest.raises(VitrailError, match=message):
        Cifar(tmp_path)


def test_wrong_files(tmp_path):
    with pytest.raises(VitrailError, match=r"'test_batch\.bin' or 'test_batch' of CIFAR-10 was not found"):
        Cifar(tmp_path)
    with pytest.raises(VitrailError, match="classes=20"):
        Cifar(tmp_path, classes=20)
    cifar10_binary(tmp_path)
    path = tmp_path / "cifar-10-batches-bin" / "test_batch.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(VitrailError, match="expected a multiple of 3073"):
        Cifar(tmp_path)
    (path.parent / "data_batch_3.bin").unlink()
    with pytest.raises(VitrailError, match=r"data_batch_3\.bin' was not found: unpack the archive again"):
        Cifar(tmp_path, split="train")
