"""Names with parameters as one word: there and back, and nothing hostile gets through."""

from __future__ import annotations

import ast
import contextlib
import math
import string
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail import VitrailError
from vitrail.calls import join_call, split_call, split_list
from vitrail.metrics import build_metric, list_metrics

NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,8}(\.[a-z_]{1,6})?", fullmatch=True)
KEYS = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)
WORDS = st.text(string.ascii_letters + string.digits + "_. -+/\\'\"%:é\n,=()[]{}", max_size=12)
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
PLAIN = st.none() | st.booleans() | NUMBERS | WORDS
VALUES = PLAIN | st.lists(PLAIN, max_size=3) | st.tuples(PLAIN, PLAIN) | st.dictionaries(KEYS, PLAIN, max_size=2)
CALLS = st.tuples(NAMES, st.dictionaries(KEYS, VALUES, max_size=4))


def typed(value: Any) -> Any:
    """1, 1.0 and True are equal, but not the same."""
    if isinstance(value, list | tuple):
        return type(value), [typed(item) for item in value]
    if isinstance(value, dict):
        return {key: typed(item) for key, item in value.items()}
    return type(value), value


@settings(max_examples=200, deadline=None)
@given(CALLS)
def test_a_call_comes_back(call: tuple[str, dict[str, Any]]) -> None:
    name, params = split_call(join_call(*call))
    assert name == call[0]
    assert typed(params) == typed(call[1])


@settings(max_examples=100, deadline=None)
@given(st.lists(CALLS, max_size=4))
def test_a_list_of_calls_comes_back(calls: list[tuple[str, dict[str, Any]]]) -> None:
    words = [join_call(*call) for call in calls]
    assert split_list(", ".join(words)) == words
    assert split_list(words) == words
    assert split_list([",".join(words), "last"]) == [*words, "last"]


@pytest.mark.parametrize("text", ["a,b", ",", "(", "])", "a{b", "x=1,y=2", "it's, or not"])
def test_words_with_commas_and_brackets_come_back(text: str) -> None:
    assert split_call(join_call("x", {"a": text})) == ("x", {"a": text})


def test_words_with_brackets_come_back_from_a_list() -> None:
    for value in (["a(", "b"], ("x]",)):
        assert split_call(join_call("x", {"a": value})) == ("x", {"a": value})


def test_infinity_comes_back() -> None:
    assert split_call(join_call("x", {"a": math.inf})) == ("x", {"a": math.inf})


def test_every_metric_comes_back() -> None:
    for name in list_metrics():
        for params in ({}, {**build_metric(name).parameters()}):
            built = build_metric(name, **params)
            again, own = split_call(join_call(name, {key: getattr(built, key) for key in built.parameters()}))
            assert build_metric(again, **own) == built
            assert split_call(join_call(name, built.given())) == (name, {})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rise", ("rise", {})),
        (" rise ( ) ", ("rise", {})),
        ("rise(masks=256, space=tokens)", ("rise", {"masks": 256, "space": "tokens"})),
        ("a.b(x=1e-3,y=-2,z=TRUE,w=none,v=False)", ("a.b", {"x": 1e-3, "y": -2, "z": True, "w": None, "v": False})),
        ("a(x='none', y=\"1\")", ("a", {"x": "none", "y": "1"})),
        ("a(x=(1, 2), y=[1, [2, 3]], z={'k': 1},)", ("a", {"x": (1, 2), "y": [1, [2, 3]], "z": {"k": 1}})),
        ("a(x=b=c)", ("a", {"x": "b=c"})),
    ],
)
def test_calls_are_read(text: str, expected: tuple[str, dict[str, Any]]) -> None:
    result = split_call(text)
    assert result == expected
    assert typed(result[1]) == typed(expected[1])


def test_lists_are_read() -> None:
    assert split_list("a, b(c=1, d=(2, 3)),,e ,") == ["a", "b(c=1, d=(2, 3))", "e"]
    assert split_list("") == []
    assert split_list(["a,b", "c"]) == ["a", "b", "c"]


@pytest.mark.parametrize(
    "text",
    ["", " ", "()", "(a=1)", "x(", "x)", "x(a=1", "x(a=1))", "x((a=1)", "a b", "x y(a=1)", "x(1)", "x(a)", "x(1=2)",
     "x(a b=1)", "x(=1)", "x(a=[1)", "x(a=1]", "x()y", "a,b", "x(a=1) y", "x;y", "x-y", "$(ls)", "`ls`"],
)  # fmt: skip
def test_what_is_no_call_is_refused(text: str) -> None:
    with pytest.raises(VitrailError, match="cannot parse"):
        split_call(text)


@pytest.mark.parametrize("text", ["x(a=1)(b=2)", "x(a=1), y(b=2)", "x(a=[1)(2])", "x(a=(1])", "x(a=][)"])
def test_crossed_brackets_are_refused(text: str) -> None:
    with pytest.raises(VitrailError, match="cannot parse"):
        split_call(text)


def test_a_parameter_given_twice_is_refused() -> None:
    with pytest.raises(VitrailError):
        split_call("x(a=1, a=2)")


@pytest.mark.parametrize("text", ["x(a={[]: 1})", "x(a={{}})"])
def test_what_cannot_be_a_key_is_refused_or_a_word(text: str) -> None:
    with contextlib.suppress(VitrailError):
        assert isinstance(split_call(text)[1]["a"], str)


def test_nothing_is_ever_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    monkeypatch.setattr("os.system", ran.append)
    for text in ("__import__('os').system('x')", "(lambda: 1)()", "open('/etc/passwd')", "9**9**9", "[x for x in y]",
                 "f'{1}'", "a.__class__", "exec('1')"):  # fmt: skip
        assert split_call(f"x(a={text})") == ("x", {"a": text})
    assert ran == []


@pytest.mark.parametrize(
    "text", ["(" * 5000 + ")" * 5000, "[" * 90 + "]" * 90, "-" * 20_000 + "1", "9" * 9000, "\0", "1\n"]
)
def test_long_and_odd_values_do_no_harm(text: str) -> None:
    name, params = split_call(f"x(a={text})")
    assert name == "x"
    assert params["a"] == text or params["a"] == ast.literal_eval(text.strip())


@settings(max_examples=200, deadline=None)
@given(st.text(string.printable.replace("{", ""), max_size=30))  # braces: test_what_cannot_be_a_key_…
def test_any_text_is_read_or_refused(text: str) -> None:
    for read in (split_call, split_list):
        with contextlib.suppress(VitrailError):
            read(text)
