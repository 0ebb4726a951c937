"""Claims of the papers as tests of a table: ``rank('TIS', column) == 1``."""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

import numpy as np

from vitrail.errors import VitrailError
from vitrail.metrics.statistics import PERCENTILES, Floats, rank_correlations
from vitrail.papers.catalogue import Claim
from vitrail.report.statistics import FEWEST_PAIRS, LEVEL, levels

MISSING = f"a cell has fewer than {FEWEST_PAIRS} images"
UNCERTAIN = "the 95 % interval includes the opposite"

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
}


class UnknownCellError(Exception):
    """A test refers to a missing cell."""


@dataclass(frozen=True)
class TableValues:
    """The cells of a table, column → row → value, and the direction of each column (1, −1, 0).

    A value is a number, or an array: the number, then that over each resample of the images. What is computed from
    arrays is an array likewise.
    """

    cells: Mapping[str, Mapping[str, float | Floats]]
    directions: Mapping[str, int]

    def cell(self, row: str, column: str) -> Floats:
        try:
            return np.atleast_1d(np.asarray(self.cells[column][row], dtype=np.float64))
        except KeyError:
            raise UnknownCellError from None

    def rank(self, row: str, column: str) -> Any:
        """1 = best; equal rows share the better rank."""
        level = levels(self._oriented(column, [*self.cells.get(column, ()), row]))
        return 1 + (level[:, :-1] > level[:, -1:]).sum(-1)

    def gap(self, row: str, column: str) -> Floats:
        """The difference between a row and the best one."""
        oriented = self._oriented(column, [*self.cells.get(column, ()), row])
        difference: Floats = oriented.max(-1) - oriented[:, -1]
        return difference

    def better(self, row: str, other: str, column: str) -> Any:
        level = levels(self._oriented(column, [row, other]))
        return level[:, 0] > level[:, 1]

    def count(self, column: str) -> int:
        """The number of rows with a value."""
        return len(self.cells.get(column, ()))

    def correlation(self, column: str, other: str) -> Floats:
        """Spearman's ρ over the common rows, each column oriented so that higher is better; 0 if one is constant."""
        rows = [row for row in self.cells.get(column, ()) if row in self.cells.get(other, ())]
        if len(rows) < 3:
            raise UnknownCellError
        return np.nan_to_num(rank_correlations(*(levels(self._oriented(label, rows)) for label in (column, other))))

    def _oriented(self, column: str, rows: Sequence[str]) -> Floats:
        """(1 + resamples, rows): cells of a column, oriented so that higher is better."""
        return np.stack([self.cell(row, column) for row in rows], axis=-1) * self.directions[column]


@dataclass(frozen=True)
class Quantity:
    """A number that a claim is about, with its 95 % interval over resampled images."""

    text: str
    kind: Literal["value", "difference", "rank", "correlation"]
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Verdict:
    """The outcome of a claim: per column (or "" for the whole table) true, false, or None = undecided, and why."""

    claim: Claim
    tests: dict[str, bool | None] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)  # of what is undecided
    quantities: dict[str, list[Quantity]] = field(default_factory=dict)

    @property
    def decided(self) -> list[bool]:
        return [outcome for outcome in self.tests.values() if outcome is not None]

    @property
    def holds(self) -> bool | None:
        """False if it fails in any column, true if it holds in all."""
        if False in self.decided:
            return False
        return True if self.decided and len(self.decided) == len(self.tests) else None


def judge(claim: Claim, values: TableValues) -> Verdict:
    """Tests a claim on a table.

    It is undecided unless at least 97.5 % of the resamples, if there are any, agree with the measured values.
    """
    verdict = Verdict(claim)
    matching = [c for c in values.directions if any(fnmatchcase(c, pattern) for pattern in claim.columns)]
    test = ast.parse(claim.test, mode="eval").body
    for column in matching or [""]:
        try:
            outcomes = np.atleast_1d(_value(test, values, column)).astype(bool)
            verdict.quantities[column] = list({q.text: q for q in _quantities(test, values, column)}.values())
        except UnknownCellError:
            verdict.tests[column], verdict.reasons[column] = None, MISSING
            continue
        agreeing = outcomes[1:] == outcomes[0]
        if len(agreeing) and agreeing.mean() < 1 - LEVEL / 2:
            verdict.tests[column], verdict.reasons[column] = None, UNCERTAIN
        else:
            verdict.tests[column] = bool(outcomes[0])
    return verdict


def _quantities(test: ast.AST, values: TableValues, column: str) -> Iterator[Quantity]:
    """The numbers that a test looks at; two cells are compared by their difference, since their images are the same."""
    calls = [node for node in ast.walk(test) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    asked = [(ast.unparse(node.func), [_value(argument, values, column) for argument in node.args]) for node in calls]
    cells = list(dict.fromkeys((arguments[0], arguments[1]) for name, arguments in asked if name == "cell"))
    if len(cells) == 2:
        yield _difference(cells[0], cells[1], values)
    for name, arguments in asked:
        match name, arguments:
            case "cell", [row, label] if len(cells) != 2:
                yield _quantity(row if label == column else f"{row}, {label}", "value", values.cell(row, label))
            case "better", [row, other, label]:
                yield _difference((row, label), (other, label), values)
            case "rank", [row, label]:
                yield _quantity(f"{row}, rank of {values.count(label)}", "rank", values.rank(row, label))
                others = [other for other in values.cells[label] if other != row]
                if others:
                    best = max(others, key=lambda other: values.cell(other, label)[0] * values.directions[label])
                    yield _difference((row, label), (best, label), values)
            case "gap", [row, label]:
                yield _quantity(f"{row}, behind the best", "difference", values.gap(row, label))
            case "correlation", [label, other]:
                yield _quantity("ρ", "correlation", values.correlation(label, other))


def _difference(cell: tuple[str, str], other: tuple[str, str], values: TableValues) -> Quantity:
    text = f"{cell[0]} − {other[0]}" if cell[1] == other[1] else f"{', '.join(cell)} − {', '.join(other)}"
    return _quantity(text, "difference", values.cell(*cell) - values.cell(*other))


def _quantity(text: str, kind: Literal["value", "difference", "rank", "correlation"], numbers: Floats) -> Quantity:
    low, high = np.percentile(numbers[1:], PERCENTILES) if len(numbers) > 1 else (np.nan, np.nan)
    return Quantity(text, kind, float(numbers[0]), float(low), float(high))


def _value(node: ast.AST, values: TableValues, column: str) -> Any:
    """The value of an expression; only a few operations are allowed."""

    def of(*parts: ast.AST) -> list[Any]:
        return [_value(part, values, column) for part in parts]

    match node:
        case ast.Constant(value=str() | int() | float() as value):
            return value
        case ast.Name(id="column"):
            return column
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -of(operand)[0]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](*of(left, right))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](*of(left, right))
        case ast.BoolOp(op=op, values=parts):
            both = np.logical_and if isinstance(op, ast.And) else np.logical_or
            return functools.reduce(both, of(*parts))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](values, *of(*args))
    raise VitrailError(f"a claim cannot be parsed at {ast.unparse(node)!r}.")


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(TableValues, name) for name in ("cell", "rank", "gap", "better", "count", "correlation")},
    "abs": lambda values, number: np.abs(number),
    "min": lambda values, *numbers: functools.reduce(np.minimum, numbers),
    "max": lambda values, *numbers: functools.reduce(np.maximum, numbers),
}
