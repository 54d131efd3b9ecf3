"""Error lines of a validation: each names the path of a key and what to do."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from kvtier.errors import ConfigError
from kvtier.tier.registry import suggest

VALUE_CHARACTERS_MAX = 60
LINE_CHARACTERS_MAX = 400
_SUBJECT = re.compile(r"^[A-Z][a-z]+ should")
MAX_PROBLEMS = 32
"""More lines do not help, and each takes time: a hostile file can hold thousands of unknown keys."""


@contextmanager
def collect_errors(problems: list[ConfigError], at: str = "") -> Iterator[None]:
    """Add a ConfigError to the problems instead of raising it, so that what else is wrong is found too.

    `at` is the path of what its key is in.
    """
    try:
        yield
    except ConfigError as error:
        problems.append(error.below(at) if at else error)


def raise_all(problems: Sequence[ConfigError]) -> None:
    """Raise one ConfigError for all problems, one line each, the first few; nothing when there are none."""
    if len(problems) == 1:
        raise problems[0]
    if problems:
        lines = [line for problem in problems for line in str(problem).splitlines()]
        more = ["... and more; correct these first"] if len(lines) > MAX_PROBLEMS else []
        raise ConfigError("\n".join([*lines[:MAX_PROBLEMS], *more]))


def short_text(value: object) -> str:
    """A value as it can stand in an error line: one line, shortened."""
    text = "a list" if isinstance(value, list) else "a mapping" if isinstance(value, dict) else repr(value)
    return text if len(text) <= VALUE_CHARACTERS_MAX else f"{text[:VALUE_CHARACTERS_MAX]}..."


def problems_of(error: ValidationError, model: type[BaseModel], data: object, at: str) -> list[ConfigError]:
    """The errors of a validation, one more than are shown at most. `data` is what was validated, `at` the path of
    `data` in its file."""
    found: dict[str, ConfigError] = {}
    for detail in error.errors(include_url=False):
        if len(found) > MAX_PROBLEMS:
            break
        path = _path(detail, data, at)
        # A union reports each branch it tried; the first line for a key is enough to act on.
        found.setdefault(path, ConfigError(_reason(detail, _model_at(model, detail["loc"][:-1])), path))
    # pydantic reports a list with wrong items as wrong itself, and a mapping that could be something else as well. The
    # lines of what is in them are the useful ones.
    within = tuple(found)
    return [
        problem
        for path, problem in found.items()
        if not any(other.startswith((f"{path}[", f"{path}.")) for other in within)
    ]


def _model_at(model: type[BaseModel], loc: Iterable[int | str]) -> type[BaseModel]:
    """The model that the key at `loc` lives in: `model`, or one nested in its fields."""
    for part in loc:
        field = model.model_fields.get(str(part))
        model = next(_models_in(field.annotation), model) if field else model
    return model


def _models_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models_in(inner)


def _path(detail: ErrorDetails, data: object, at: str) -> str:
    """The path of a key. Parts that name a union's branch and no key of the data are left out."""
    path, parts = at, detail["loc"]
    for index, part in enumerate(parts):
        absent = detail["type"] == "missing" and index == len(parts) - 1
        if isinstance(part, int) and isinstance(data, list) and part < len(data):
            path, data = f"{path}[{part}]", data[part]
        elif isinstance(part, str) and isinstance(data, Mapping) and (absent or part in data):
            path, data = f"{path}.{_key(part)}" if path else _key(part), data.get(part)
    return path


def _key(key: str) -> str:
    """A key as it can stand in an error line: printable and short, also for a key of a hostile file."""
    return key if key.isprintable() and len(key) <= VALUE_CHARACTERS_MAX else short_text(key)


def _reason(detail: ErrorDetails, model: type[BaseModel]) -> str:
    kind, given, context = detail["type"], _input_text(detail["input"], model), detail.get("ctx", {})
    if kind == "extra_forbidden":
        known = [name for name in model.model_fields if name != "type"]
        return f"unknown key{suggest(str(detail['loc'][-1]), known)} (known keys: {', '.join(known)})"
    if kind == "missing":
        field = model.model_fields.get(str(detail["loc"][-1]))
        meaning = f" ({field.description})" if field and field.description else ""
        return f"is required{meaning}; add it"
    if kind == "value_error":
        text = str(context.get("error", detail["msg"]))
        return _one_line(text.replace(repr(detail["input"]), given))
    if kind in ("literal_error", "enum"):
        return f"{given} is not known; write {context.get('expected', 'another value')}"
    if kind == "too_short":
        return f"needs at least {context['min_length']} item(s)"
    wanted = _SUBJECT.sub("it should", _one_line(detail["msg"]))
    return f"{given} is not accepted; {wanted.replace('array', 'list').replace('object', 'mapping')}"


def _input_text(value: object, model: type[BaseModel]) -> str:
    """A value in an error line; no text of a model that hides what it was given, because it may be a secret."""
    return "that" if isinstance(value, str) and model.model_config.get("hide_input_in_errors") else short_text(value)


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LINE_CHARACTERS_MAX else f"{line[:LINE_CHARACTERS_MAX]}..."
