"""What is written once: no function body of more than six lines occurs twice in src/."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
LONGEST = 6  # lines that two functions may share


def body_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """The statements in one spelling, without the docstring."""
    documented = ast.get_docstring(function, clean=False) is not None
    return "\n".join(ast.unparse(statement) for statement in function.body[documented:])


def repeated(sources: dict[str, str]) -> list[list[str]]:
    """The places, each as "file:line name", of every body that stands at several."""
    places: dict[str, list[str]] = defaultdict(list)
    for name, text in sources.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = body_of(node)
                if body.count("\n") >= LONGEST:
                    places[body].append(f"{name}:{node.lineno} {node.name}")
    return [alike for alike in places.values() if len(alike) > 1]


def test_no_body_is_written_twice() -> None:
    files = sorted(SOURCE.rglob("*.py"))
    assert repeated({str(path.relative_to(SOURCE)): path.read_text(encoding="utf-8") for path in files}) == []


def test_a_repeated_body_is_seen_whatever_its_spelling() -> None:
    lines = [f"    x{i} = f({i}, 'a')" for i in range(7)]
    first = "def first():\n    '''Says this.'''\n" + "\n".join(lines)
    again = "class C:\n  async def again(self):\n    # a comment\n" + "\n".join(lines).replace("'", '"')
    assert repeated({"a": first, "b": again}) == [["a:1 first", "b:2 again"]]
    assert repeated({"a": first, "b": again.replace("x6", "y")}) == []
    assert repeated({"a": first.replace(lines[-1], ""), "b": again.rpartition("\n")[0]}) == [], "six lines may"
