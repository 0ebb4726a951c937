"""A registry: names of one kind of thing, and what they stand for."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Generic, TypeVar

from vitrail.errors import VitrailError
from vitrail.plugins import EntryPoints, importing_package, warn_once

T = TypeVar("T")


class Registry(Generic[T]):
    """Entries by name: built-in ones, those registered in this process, and those of installed packages.

    Built-in modules register theirs when they are imported, which happens at the first look-up. Packages are imported
    when a name is looked up that is none of these, or when all names are listed.

    Args:
        kind: what an entry is, for messages: "method".
        modules: the modules with the built-in entries.
        aliases: other names of entries.
        listing: the command that lists the entries.
        group: the group of entry points by which packages bring entries: "vitrail.methods".
        reserved: whether a name stands for something built-in that is no entry.
    """

    def __init__(
        self,
        kind: str,
        modules: Iterable[str] = (),
        aliases: Mapping[str, str] | None = None,
        listing: str = "",
        group: str = "",
        reserved: Callable[[str], bool] = lambda name: False,
    ) -> None:
        self.kind, self.modules, self.aliases, self.listing = kind, tuple(modules), dict(aliases or {}), listing
        self.reserved, self.points = reserved, EntryPoints(group, kind)
        self._entries: dict[str, T] = {}
        self._installed: dict[str, T] = {}
        self._imported = False

    def add(self, name: str, entry: T, module: str) -> None:
        """Registers an entry; a name that another module has taken is refused, that of a package left out."""
        if module not in self.modules:
            self.entries()  # or a built-in entry of this name would come second
        package = importing_package()
        if package is not None and self._is_taken(name, module, {**self._installed, **self._entries}):
            self._say_hidden(name, package)
            return
        if self._is_taken(name, module, self._entries):
            raise VitrailError(f"there is already a {self.kind} {name!r}: choose another name.")
        if not name.isidentifier() or name != name.lower():
            raise VitrailError(
                f"a {self.kind} name consists of lower-case letters, digits and underscores, but got {name!r}."
            )
        (self._entries if package is None else self._installed)[name] = entry

    def entries(self) -> dict[str, T]:
        """The built-in entries and those registered in this process, by name."""
        if not self._imported:  # a module that is being imported by another thread is waited for
            for module in self.modules:
                import_module(module)
            self._imported = True
        return self._entries

    def every_entry(self) -> dict[str, T]:
        """All entries by name, those of installed packages too."""
        entries = self.entries()
        self.points.load_all()
        return {**self._installed, **entries}

    def get(self, name: str) -> T | None:
        """An entry by name, None if there is none; raises if a package should bring it and cannot."""
        entries = self.entries()
        if name not in entries and name not in self._installed:
            self.points.load(name)
        if name not in entries and name not in self._installed:
            self.points.load_all()
        package = self.points.package_with(name)
        if package is not None:
            self._check_brought(name, package)
        return entries.get(name, self._installed.get(name))

    def __getitem__(self, name: str) -> T:
        entry = self.get(name)
        if entry is not None:
            return entry
        close = difflib.get_close_matches(name, [*self.every_entry(), *self.aliases], n=3, cutoff=0.5)
        hint = f" Did you mean {', '.join(close)}?" if close else ""
        listing = f" `{self.listing}` lists them." if self.listing else ""
        raise VitrailError(f"there is no {self.kind} {name!r}.{hint}{listing}")

    def mention_hidden(self, name: str) -> None:
        """Says so if an installed package has an entry of the name of something built-in."""
        package = self.points.package_with(name)
        if package is not None:
            self._say_hidden(name, package)

    def _is_taken(self, name: str, module: str, entries: Mapping[str, T]) -> bool:
        known = entries.get(name)
        is_other = known is not None and getattr(known, "__module__", None) != module
        return is_other or name in self.aliases or self.reserved(name)

    def _check_brought(self, name: str, package: str) -> None:
        """Says that a built-in entry hides that of a package; refuses a package that does not bring what it names."""
        entry = self._entries.get(name)
        if entry is not None and str(getattr(entry, "__module__", "")).startswith("vitrail."):
            self._say_hidden(name, package)
        elif entry is None and name not in self._installed:
            raise VitrailError(
                f"the package {package} has an entry point {name!r} in {self.points.group}, but importing it registers "
                f"no {self.kind} of this name."
            )

    def _say_hidden(self, name: str, package: str) -> None:
        warn_once(
            f"the {self.kind} {name!r} of the package {package} is ignored: there is another {self.kind} of this name, "
            "which comes first."
        )

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
