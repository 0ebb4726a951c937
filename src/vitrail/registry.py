"""A registry: names of one kind of thing, and what they stand for."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Generic, TypeVar

from vitrail.errors import VitrailError

T = TypeVar("T")


class Registry(Generic[T]):
    """Entries by name. Built-in modules register theirs when they are imported, which happens at the first look-up.

    Args:
        kind: what an entry is, for messages: "method".
        modules: the modules with the built-in entries.
        aliases: other names of entries.
        listing: the command that lists the entries.
    """

    def __init__(
        self, kind: str, modules: Iterable[str] = (), aliases: Mapping[str, str] | None = None, listing: str = ""
    ) -> None:
        self.kind, self.modules, self.aliases, self.listing = kind, tuple(modules), dict(aliases or {}), listing
        self._entries: dict[str, T] = {}

    def add(self, name: str, entry: T, module: str) -> None:
        """Registers an entry; a name that another module has taken is refused."""
        known = self._entries.get(name)
        if known is not None and getattr(known, "__module__", None) != module:
            raise VitrailError(f"there is already a {self.kind} {name!r}: choose another name.")
        if not name.isidentifier() or name != name.lower():
            raise VitrailError(
                f"a {self.kind} name consists of lower-case letters, digits and underscores, but got {name!r}."
            )
        self._entries[name] = entry

    def entries(self) -> dict[str, T]:
        """All entries by name."""
        for module in self.modules:
            import_module(module)
        return self._entries

    def __getitem__(self, name: str) -> T:
        entries = self.entries()
        if name in entries:
            return entries[name]
        close = difflib.get_close_matches(name, [*entries, *self.aliases], n=3, cutoff=0.5)
        hint = f" Did you mean {', '.join(close)}?" if close else ""
        listing = f" `{self.listing}` lists them." if self.listing else ""
        raise VitrailError(f"there is no {self.kind} {name!r}.{hint}{listing}")

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Entries added inside are gone afterwards."""
        before = dict(self.entries())
        try:
            yield
        finally:
            self._entries.clear()
            self._entries.update(before)


def matching(names: Iterable[str], pattern: str) -> list[str]:
    """The names that match a glob, sorted."""
    return sorted(name for name in names if fnmatchcase(name, pattern))


def first_line(documented: Callable[..., object] | type) -> str:
    """The summary of a docstring."""
    import inspect

    return (inspect.getdoc(documented) or "").split("\n")[0]
