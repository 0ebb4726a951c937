"""Boxes from XML files as Pascal VOC defined them and ILSVRC took them over."""

from __future__ import annotations

import math
from pathlib import Path
from xml.etree import ElementTree

from vitrail.data.paths import broken, read_bytes
from vitrail.geometry import Box

_WHAT = "annotation"
_EDGES = ("xmin", "ymin", "xmax", "ymax")


class _DoctypeError(Exception):
    """A document type, which could declare entities that expand without end or name other files."""


class _PlainTree(ElementTree.TreeBuilder):
    """Elements of a document without a document type, in whatever encoding it is."""

    def doctype(self, name: str, public: str | None, system: str | None) -> None:
        """Called by the parser before it reads any entity."""
        raise _DoctypeError


def read_xml_boxes(path: Path) -> tuple[tuple[int, int] | None, list[tuple[str, Box]]]:
    """The (width, height) that a file declares, and (class, (xmin, ymin, xmax, ymax)) of its objects, as written."""
    data = read_bytes(path, _WHAT, "it belongs to the image of the same name")
    try:
        tree = ElementTree.fromstring(data, ElementTree.XMLParser(target=_PlainTree()))  # nosec B314 # no entities
    except _DoctypeError:
        raise broken(_WHAT, path, "it declares a document type or entities, which annotations never need") from None
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        raise broken(_WHAT, path, f"it is not valid XML ({error})") from None
    return _size(tree, path), [(_text(item, "name", path), _box(item, path)) for item in tree.iterfind("object")]


def _size(tree: ElementTree.Element, path: Path) -> tuple[int, int] | None:
    """The declared size; some files declare 0 × 0, which says nothing."""
    if tree.find("size") is None:
        return None
    width, height = (int(_number(tree, f"size/{edge}", path)) for edge in ("width", "height"))
    return (width, height) if width > 0 and height > 0 else None


def _box(item: ElementTree.Element, path: Path) -> Box:
    x0, y0, x1, y1 = (_number(item, f"bndbox/{edge}", path) for edge in _EDGES)
    return x0, y0, x1, y1


def _number(item: ElementTree.Element, name: str, path: Path) -> float:
    text = _text(item, name, path)
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise broken(_WHAT, path, f"<{name}> is {text[:40]!r}, expected a number")
    return number


def _text(item: ElementTree.Element, name: str, path: Path) -> str:
    text = (item.findtext(name) or "").strip()
    if not text:
        raise broken(_WHAT, path, f"<{name}> is missing in <{item.tag}>")
    return text
