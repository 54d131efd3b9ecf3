"""The part of YAML a stack file may use: plain mappings, lists and scalars, small and shallow.

Built on the parser's event stream, so size, depth and node limits hold before anything is constructed. Scalars follow
YAML 1.2's core schema: `yes` and `12:30` are text, only `true` and `false` are booleans.

PyYAML has to parse with libyaml, as its wheels do. Its parser in Python takes some twenty times as long, so that a
hostile text of the accepted size would keep a program waiting.
"""

import math
import os
import re
import stat
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml
from yaml.reader import Reader

from kvtier.errors import ConfigError

MAX_BYTES = 64 << 10
MAX_DEPTH = 16
MAX_NODES = 1024
MAX_DIGITS = 20
_TOO_DEEP = f"nested deeper than {MAX_DEPTH} levels"

_LIBYAML: type[Any] | None = getattr(yaml, "CSafeLoader", None)
_INTEGER = re.compile(r"[-+]?[0-9]+|0x[0-9a-fA-F]+|0o[0-7]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_WORDS: dict[str, bool | None] = dict.fromkeys(("", "~", "null", "Null", "NULL"))
_WORDS |= dict.fromkeys(("true", "True", "TRUE"), True) | dict.fromkeys(("false", "False", "FALSE"), False)

Value = None | bool | int | float | str | list["Value"] | dict[str, "Value"]


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a small regular UTF-8 file. Raises ConfigError otherwise; never blocks on a pipe or a device."""
    name = os.fspath(path)
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ConfigError(f"{name} does not exist; give the path of a stack file") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name} cannot be opened: {getattr(error, 'strerror', None) or error}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ConfigError(f"{name} is not a regular file; give the path of a stack file")
    with open(descriptor, "rb") as file:
        raw = file.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{Path(name).name} is larger than {MAX_BYTES >> 10} KiB; a stack file holds only options")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{Path(name).name} is not UTF-8 (byte {error.start}); save it as UTF-8") from None


def parse_text(text: str) -> Value:
    """The one document in a text. Raises ConfigError for anything outside the accepted part of YAML."""
    if _LIBYAML is None:
        raise ConfigError("PyYAML was built without libyaml, which reads stack files; install a wheel of PyYAML")
    if len(text) > MAX_BYTES or len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise ConfigError(f"the text is larger than {MAX_BYTES >> 10} KiB; a stack file holds only options")
    sign = Reader.NON_PRINTABLE.search(text)
    if sign:
        number = text.count("\n", 0, sign.start()) + 1
        raise ConfigError(f"line {number}: the character #x{ord(sign[0]):04x} is not accepted")
    try:
        # A document has no use for directives, and the parser's time in them is not bounded by our limits.
        for number, line in enumerate(text.splitlines(), 1):
            if line.startswith("%"):
                raise ConfigError(f"line {number}: YAML directives (lines that begin with %) are not accepted")
        loader = _LIBYAML(text)
        try:
            return _Builder(_events(loader)).document()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark: Any = error.problem_mark or error.context_mark
        if "nesting depth" in (error.problem or ""):
            # Libyaml since PyYAML 6.0.4 reads on in the line, to a bound of its own, before it reports its beginning.
            raise ConfigError(f"line {mark.line + 1}: {_TOO_DEEP}") from None
        place = f"line {mark.line + 1}, column {mark.column + 1}"
        raise ConfigError(f"not valid YAML ({place}): {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"not valid YAML: {' '.join(str(error).split())}") from None


def _events(loader: Any) -> Iterator[yaml.Event]:
    while loader.check_event():
        yield loader.get_event()


def _refuse(event: yaml.Event, reason: str) -> ConfigError:
    mark: Any = event.start_mark
    return ConfigError(f"line {mark.line + 1}: {reason}")


class _Builder:
    """Makes plain values from events, counting nodes and depth as it goes."""

    def __init__(self, events: Iterator[yaml.Event]) -> None:
        self._events = events
        self._nodes = 0

    def document(self) -> Value:
        value: Value = None
        documents = 0
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise _refuse(event, "a second document begins here; a stack file holds one")
                value = self._value(next(self._events), 0)
        return value

    def _value(self, event: yaml.Event, depth: int) -> Value:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise _refuse(event, f"more than {MAX_NODES} values; a stack file holds only options")
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise _refuse(event, "anchors and aliases (& and *) are not accepted; write the value out")
        tag = getattr(event, "tag", None)
        if tag:
            raise _refuse(event, f"tags are not accepted (got {str(tag)[:40]!r}); write the plain value")
        if isinstance(event, yaml.ScalarEvent):
            return _scalar(event)
        if depth >= MAX_DEPTH:
            raise _refuse(event, _TOO_DEEP)
        if isinstance(event, yaml.SequenceStartEvent):
            return [self._value(item, depth + 1) for item in self._until(yaml.SequenceEndEvent)]
        values: dict[str, Value] = {}
        for item in self._until(yaml.MappingEndEvent):
            key = self._value(item, depth + 1)
            if not isinstance(key, str):
                raise _refuse(item, "a key must be plain text")
            if key in values:
                raise _refuse(item, f"the key {key[:40]!r} is given twice; keep one")
            values[key] = self._value(next(self._events), depth + 1)
        return values

    def _until(self, end: type[yaml.Event]) -> Iterator[yaml.Event]:
        return takewhile(lambda event: not isinstance(event, end), self._events)


def _scalar(event: yaml.ScalarEvent) -> Value:
    text: str = event.value
    if not event.implicit[0]:
        return text
    if text in _WORDS:
        return _WORDS[text]
    if _NOT_FINITE.fullmatch(text):
        raise _refuse(event, f"{text} is not a finite number")
    if _INTEGER.fullmatch(text):
        if len(text) > MAX_DIGITS:
            raise _refuse(event, f"a number of more than {MAX_DIGITS} digits")
        return int(text, {"0x": 16, "0o": 8}.get(text[:2], 10))
    if _FLOAT.fullmatch(text):
        number = float(text)
        if not math.isfinite(number):
            raise _refuse(event, f"{text[:40]} is too large for a number")
        return number
    return text
