"""Claims of the papers as tests of a table: ``rank('TIS', column) == 1``."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from vitrail.errors import VitrailError
from vitrail.metrics.statistics import rank_correlations
from vitrail.papers.catalogue import Claim

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
    """The cells of a table, column → row → value, and the direction of each column (1, −1, 0)."""

    cells: Mapping[str, Mapping[str, float]]
    directions: Mapping[str, int]

    def cell(self, row: str, column: str) -> float:
        try:
            return self.cells[column][row]
        except KeyError:
            raise UnknownCellError from None

    def rank(self, row: str, column: str) -> int:
        """1 = best; equal rows share the better rank."""
        value, direction = self.cell(row, column), self.directions[column]
        return 1 + sum((other - value) * direction > 0 for other in self.cells[column].values())

    def gap(self, row: str, column: str) -> float:
        """The difference between a row and the best one."""
        value, direction = self.cell(row, column), self.directions[column]
        return max((other - value) * direction for other in self.cells[column].values())

    def better(self, row: str, other: str, column: str) -> bool:
        return (self.cell(row, column) - self.cell(other, column)) * self.directions[column] > 0

    def count(self, column: str) -> int:
        """The number of rows with a value."""
        return len(self.cells.get(column, ()))

    def correlation(self, column: str, other: str) -> float:
        """Spearman's ρ over the common rows, each column oriented so that higher is better; 0 if one is constant."""
        rows = [row for row in self.cells.get(column, ()) if row in self.cells.get(other, ())]
        if len(rows) < 3:
            raise UnknownCellError
        first, second = (np.array([[self.cells[c][row] * self.directions[c] for row in rows]]) for c in (column, other))
        return float(np.nan_to_num(rank_correlations(first, second)[0]))


@dataclass(frozen=True)
class Verdict:
    """The outcome of a claim: per column (or "" for the whole table) true, false, or None = undecided."""

    claim: Claim
    tests: dict[str, bool | None] = field(default_factory=dict)

    @property
    def decided(self) -> list[bool]:
        return [outcome for outcome in self.tests.values() if outcome is not None]

    @property
    def holds(self) -> bool | None:
        return all(self.decided) if self.decided else None


def judge(claim: Claim, values: TableValues) -> Verdict:
    """Tests a claim on a table."""
    columns = [c for c in values.directions if any(fnmatchcase(c, pattern) for pattern in claim.columns)]
    return Verdict(claim, {column: _test(claim.test, values, column) for column in columns or [""]})


def _test(text: str, values: TableValues, column: str) -> bool | None:
    try:
        return bool(_value(ast.parse(text, mode="eval").body, values, column))
    except UnknownCellError:
        return None


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
            return all(of(*parts)) if isinstance(op, ast.And) else any(of(*parts))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](values, *of(*args))
    raise VitrailError(f"a claim cannot be parsed at {ast.unparse(node)!r}.")


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(TableValues, name) for name in ("cell", "rank", "gap", "better", "count", "correlation")},
    "abs": lambda values, number: abs(number),
    "min": lambda values, *numbers: min(numbers),
    "max": lambda values, *numbers: max(numbers),
}
