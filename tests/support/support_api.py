"""The public names of `kvtier` as a document: `python tests/support/support_api.py > docs/api.md`."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cached_property
from typing import Any

from pydantic import BaseModel

import kvtier

HEAD = """# The public API

An embedder imports `kvtier` alone. This page lists every public name with its signature and the first line of its
docstring; of methods the names of parameters alone. An editor shows types and whole docstrings. It is generated, and a
test compares it with the code. [stability.md](stability.md) states which names are frozen and which are provisional.
"""


FIELDS_TYPED_MAX = 12
"""Values with more fields are shown by the names of these alone."""


class _Verbatim(str):
    """An annotation that a signature shows without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def public_names() -> list[str]:
    """The names of the face in the order of the page: functions, then classes, then exceptions."""
    names = [name for name in kvtier.__all__ if not name.startswith("_")]
    return sorted(names, key=lambda name: (_rank(getattr(kvtier, name)), name))


def _rank(thing: Any) -> int:
    return 0 if not inspect.isclass(thing) else 2 if issubclass(thing, BaseException) else 1


def members(owner: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that a class of kvtier defines or takes over from another one of kvtier."""
    for name in dir(owner):
        home = next((base for base in owner.__mro__ if name in vars(base)), object)
        if not name.startswith("_") and home.__module__.partition(".")[0] == "kvtier":
            thing = inspect.getattr_static(owner, name)
            if isinstance(thing, property | cached_property | classmethod | staticmethod) or inspect.isfunction(thing):
                yield name, thing


def function_of(thing: Any) -> Any:
    """What a property, a class method or a static method wraps."""
    if isinstance(thing, cached_property):
        return thing.func
    return thing.fget if isinstance(thing, property) else getattr(thing, "__func__", thing)


def signature(thing: Any) -> str:
    """A signature as it stands in the code."""
    found = inspect.signature(thing)
    parameters = [
        parameter.replace(annotation=_verbatim(parameter.annotation)) for parameter in found.parameters.values()
    ]
    return str(found.replace(parameters=parameters, return_annotation=_verbatim(found.return_annotation)))


def bare_signature(thing: Any) -> str:
    """A signature without the types of its parameters."""
    parameters = inspect.signature(thing).parameters.values()
    kept = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for index, parameter in enumerate(parameters)
        if index or parameter.name not in ("self", "cls")
    ]
    return re.sub(r"<\w+\.(\w+): [^>]*>", r"\1", str(inspect.Signature(kept)))


def _verbatim(annotation: Any) -> Any:
    if annotation is inspect.Parameter.empty:
        return annotation
    shown = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return _Verbatim(re.sub(r"\b(?:kvtier|collections|typing)(?:\.\w+)*\.(?=\w)", "", shown))


def first_line(thing: Any) -> str:
    """The first line of a docstring, with the line it may go on to."""
    paragraph = (inspect.getdoc(thing) or "").partition("\n\n")[0]
    return " ".join(paragraph.split())


def _entry(name: str) -> Iterator[str]:
    thing = getattr(kvtier, name)
    if not inspect.isclass(thing):
        shown = f"{name}{signature(thing)}" if inspect.isfunction(thing) else name
        text = (
            first_line(thing) if inspect.isfunction(thing) else f"A `{thing.__supertype__.__name__}` of its own type."
        )
        yield f"### {name}\n\n{_code(shown)}\n\n{_wrapped(text)}\n"
        return
    yield f"### {name}\n"
    if issubclass(thing, Enum):
        values = ", ".join(f"`{value.name}`" for value in thing)
        yield f"{_wrapped(first_line(thing))}\n\n{_wrapped(f'Values: {values}.')}\n"
        return
    if issubclass(thing, BaseModel):
        yield f"{_code(', '.join(thing.model_fields))}\n"
    elif is_dataclass(thing) and len(fields(thing)) > FIELDS_TYPED_MAX:
        yield f"{_code(', '.join(field.name for field in fields(thing)))}\n"
    elif not issubclass(thing, BaseException):
        yield f"{_code(name + signature(thing))}\n"
    yield _wrapped(first_line(thing)) + "\n"
    lines = list(_members(thing))
    if lines and not issubclass(thing, BaseException):
        yield "\n".join(lines) + "\n"


def _wrapped(text: str, indent: str = "") -> str:
    """Lines of at most 120 columns, broken at blanks."""
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _code(text: str) -> str:
    """An indented block."""
    return textwrap.indent(_wrapped(text), "    ")


def _members(owner: type) -> Iterator[str]:
    """The entries of a class's members; those that an earlier class of the page has too are named alone."""
    earlier: dict[str, list[str]] = {}
    for name, item in members(owner):
        home = next((other for other in public_names() if _has(other, name, item)), owner.__name__)
        if home == owner.__name__:
            yield _member(name, item)
        else:
            earlier.setdefault(home, []).append(f"`{name}`")
    for home, names in earlier.items():
        yield _wrapped(f"- As in {home}: {', '.join(names)}.", "  ")


def _has(other: str, name: str, item: Any) -> bool:
    """Whether a class of the page has this very member."""
    thing = getattr(kvtier, other)
    return inspect.isclass(thing) and any(found == name and shared is item for found, shared in members(thing))


def _member(name: str, item: Any) -> str:
    function = function_of(item)
    shown = name if isinstance(item, property | cached_property) else name + bare_signature(function)
    kind = "async " if inspect.iscoroutinefunction(function) else ""
    return _wrapped(f"- `{kind}{shown}`: {first_line(function)}", "  ")


def callables() -> Iterator[tuple[str, Any]]:
    """Everything public that has a signature, by its name."""
    for name in public_names():
        thing = getattr(kvtier, name)
        if inspect.isfunction(thing):
            yield name, thing
        elif inspect.isclass(thing) and not issubclass(thing, Enum | BaseException | BaseModel):
            yield name, thing.__init__
            yield from ((f"{name}.{found}", function_of(item)) for found, item in members(thing))


def further_types() -> dict[str, str]:
    """The types of kvtier that public signatures name and `kvtier` itself does not hold, with their modules."""
    found = {}
    for _, function in callables():
        for annotation in map(str, function.__annotations__.values()):
            for name in re.findall(r"[A-Za-z_]\w*", annotation):
                module = getattr(function.__globals__.get(name), "__module__", "")
                if module.partition(".")[0] == "kvtier" and name not in kvtier.__all__:
                    found[name] = module
    return dict(sorted(found.items()))


def render() -> str:
    """The whole page."""
    further = "".join(f"- `{module}.{name}`\n" for name, module in further_types().items())
    entries = (part for name in public_names() for part in _entry(name))
    return "\n".join([HEAD, *entries, f"## Further types that signatures name\n\n{further}"])


if __name__ == "__main__":
    print(render(), end="")
