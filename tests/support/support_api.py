"""The public names of `kvtier` as a document: `python tests/support/support_api.py > docs/api.md`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from enum import Enum
from functools import cached_property
from typing import Any

from pydantic import BaseModel

import kvtier

HEAD = """# The public API

An embedder imports `kvtier` alone. This page lists every public name with its signature and the first line of its
docstring; the docstrings say the rest. A test keeps this page and the code together.
"""


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


def signature(thing: Any, owner: type | None = None) -> str:
    """A signature as it stands in the code, without `self`."""
    found = inspect.signature(thing)
    parameters = [
        parameter.replace(annotation=_verbatim(parameter.annotation))
        for index, parameter in enumerate(found.parameters.values())
        if owner is None or index or parameter.name not in ("self", "cls")
    ]
    return str(found.replace(parameters=parameters, return_annotation=_verbatim(found.return_annotation)))


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
        yield f"### {name}\n\n```text\n{shown}\n```\n\n{text}\n"
        return
    yield f"### {name}\n"
    if issubclass(thing, Enum):
        yield f"{first_line(thing)}\n\nValues: {', '.join(f'`{value.name}`' for value in thing)}.\n"
        return
    if issubclass(thing, BaseModel):
        yield f"```text\n{name}: {', '.join(thing.model_fields)}\n```\n"
    elif not issubclass(thing, BaseException):
        yield f"```text\n{name}{signature(thing)}\n```\n"
    yield first_line(thing) + "\n"
    lines = [_member(found, item, thing) for found, item in members(thing)]
    if lines and not issubclass(thing, BaseException):
        yield "\n".join(lines) + "\n"


def _member(name: str, item: Any, owner: type) -> str:
    function = function_of(item)
    shown = name if isinstance(item, property | cached_property) else name + signature(function, owner)
    kind = "async " if inspect.iscoroutinefunction(function) else ""
    return f"- `{kind}{shown}`: {first_line(function)}"


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
