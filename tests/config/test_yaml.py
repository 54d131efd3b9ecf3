"""A stack file is a small, plain YAML document; everything else is refused before anything is built from it."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.config import parse_stack, strict_yaml
from kvtier.config.strict_yaml import MAX_BYTES, MAX_DEPTH, MAX_NODES, parse_text, read_text
from kvtier.errors import ConfigError


def test_plain_mappings_lists_and_scalars_are_read() -> None:
    text = """
    # a comment
    name: "quoted"
    size: 64GiB
    count: 12
    hex: 0x10
    ratio: 0.5
    exponent: 1e3
    on: true
    off: False
    nothing: null
    empty:
    list: [1, -2, text]
    nested: {a: {b: [c]}}
    """
    assert parse_text(text) == {
        "name": "quoted",
        "size": "64GiB",
        "count": 12,
        "hex": 16,
        "ratio": 0.5,
        "exponent": 1000.0,
        "on": True,
        "off": False,
        "nothing": None,
        "empty": None,
        "list": [1, -2, "text"],
        "nested": {"a": {"b": ["c"]}},
    }


@pytest.mark.parametrize(
    "text", ["yes", "no", "on", "12:30:45", "2024-01-01", "1_000", "0b1", "=", "<<", "-", ".", "+"]
)
def test_words_that_old_yaml_turned_into_other_things_stay_text(text: str) -> None:
    assert parse_text(f"key: {text!r}") == {"key": text}
    if text not in "-":
        assert parse_text(f"key: {text}") == {"key": text}


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n"])
def test_an_empty_document_is_nothing(text: str) -> None:
    assert parse_text(text) is None


REFUSED = {
    "anchor": ("a: &x 1", "anchors and aliases"),
    "alias": ("a: &x 1\nb: *x", "anchors and aliases"),
    "anchored list": ("a: &x [1]", "anchors and aliases"),
    "anchored mapping": ("a: &x {b: 1}", "anchors and aliases"),
    "anchored key": ("&x a: 1", "anchors and aliases"),
    "billion laughs": ("a: &a [x]\n" + "b: [*a, *a]\n" * 9, "anchors and aliases"),
    "merge of an alias": ("a: &x {b: 1}\nc: {<<: *x}", "anchors and aliases"),
    "duplicate key": ("a: 1\na: 2", "line 2: the key 'a' is given twice"),
    "duplicate key, quoted": ("a: 1\n'a': 2", "given twice"),
    "duplicate key, nested": ("x: {a: 1, b: 2, a: 3}", "given twice"),
    "custom tag": ("a: !secret x", "tags are not accepted"),
    "python tag": ("a: !!python/object/apply:os.system [ls]", "tags are not accepted"),
    "standard tag": ("a: !!str 5", "tags are not accepted"),
    "binary": ("a: !!binary aGVsbG8=", "tags are not accepted"),
    "tag of the document": ("!!map {a: 1}", "tags are not accepted"),
    "deep list": ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "nested deeper"),
    "deep mapping": ("{a: " * (MAX_DEPTH + 1) + "1" + "}" * (MAX_DEPTH + 1), "nested deeper"),
    "deep bomb": ("[" * 60_000, f"line 1: nested deeper than {MAX_DEPTH} levels"),
    "deep bomb of mappings": ("a: 1\nb: " + "{a: " * 12_000, f"line 2: nested deeper than {MAX_DEPTH} levels"),
    "deep bomb in lines": ("[\n" * 30_000, f"line {MAX_DEPTH + 1}: nested deeper than {MAX_DEPTH} levels"),
    "deep block bomb": ("- " * 30_000, f"line 1: nested deeper than {MAX_DEPTH} levels"),
    "too many values": ("[" + "1," * (MAX_NODES + 1) + "]", "more than"),
    "too large": ("a" * (MAX_BYTES + 1), "larger than 64 KiB"),
    "too large in bytes": ("\u00e9" * (MAX_BYTES // 2 + 1), "larger than 64 KiB"),
    "two documents": ("a: 1\n---\nb: 2", "a second document"),
    "directive": ("%YAML 1.2\n---\na: 1", "directives"),
    "many directives": ("".join(f"%TAG !{i}! x{i}\n" for i in range(3000)), "directives"),
    "infinity": ("a: .inf", "not a finite number"),
    "minus infinity": ("a: -.INF", "not a finite number"),
    "not a number": ("a: .nan", "not a finite number"),
    "overflow": ("a: 1e999", "too large"),
    "endless digits": ("a: " + "9" * 5000, "more than 20 digits"),
    "number as key": ("1: a", "a key must be plain text"),
    "true as key": ("true: a", "a key must be plain text"),
    "list as key": ("[a]: b", "a key must be plain text"),
    "mapping as key": ("? {a: 1}\n: b", "a key must be plain text"),
    "unbalanced": ("a: [1, 2", "not valid YAML"),
    "tab": ("a:\n\t- b", "not valid YAML"),
    "control character": ("a: \x07", "#x0007 is not accepted"),
    "lone surrogate": ("a: \ud800", "#xd800 is not accepted"),
    "nul": ("a: \x00", "#x0000 is not accepted"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_stack_file_may_not_hold_is_refused_in_one_line(case: str) -> None:
    text, reason = REFUSED[case]
    with pytest.raises(ConfigError) as caught:
        parse_text(text)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_where_pyyaml_comes_without_libyaml_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strict_yaml, "_LIBYAML", None)
    with pytest.raises(ConfigError, match="PyYAML was built without libyaml") as caught:
        parse_text("a: 1")
    assert "\n" not in str(caught.value)


def test_of_many_mistakes_the_first_are_reported() -> None:
    text = "tiers:\n  - {type: cpu, cpu_bytes_to_use: 1GiB}\n" + "".join(f"key{n}: 1\n" for n in range(400))
    with pytest.raises(ConfigError) as caught:
        parse_stack(text)
    lines = str(caught.value).splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        *(f"key{n}" for n in range(32)),
        "... and more; correct these first",
    ]
    with pytest.raises(ConfigError, match=r"tiers\[64\]: 65 tiers; a stack has at most 64"):
        parse_stack("tiers:\n" + "  - {type: cpu, cpu_bytes_to_use: 1GiB}\n" * 65)


@pytest.mark.parametrize(
    ("key", "shown"), [('"a\\nb"', r"'a\nb'"), ('"\\e[2J"', r"'\x1b[2J'"), ("k" * 99, "'" + "k" * 59 + "...")]
)
def test_a_key_can_neither_break_a_line_nor_reach_the_terminal(key: str, shown: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_stack(f"tiers:\n  - {{type: cpu, cpu_bytes_to_use: 1GiB}}\n{key}: 1\n")
    assert str(caught.value).startswith(f"{shown}: unknown key")


def test_a_character_that_is_not_accepted_is_named_with_its_line() -> None:
    with pytest.raises(ConfigError, match="line 2: the character #x0007 is not accepted"):
        parse_text("a: \u00e9\u00e9\nb: \x07\n")
    with pytest.raises(ConfigError, match="line 2: YAML directives"):
        parse_text("\n%YAML 1.2\n---\na: 1")


def test_limits_are_limits_and_not_one_less() -> None:
    value = parse_text("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    depth = 0
    while isinstance(value, list):
        depth, value = depth + 1, value[0] if value else None
    assert depth == MAX_DEPTH
    assert parse_text("a: " + "b" * (MAX_BYTES - 3)) == {"a": "b" * (MAX_BYTES - 3)}
    assert parse_text("[" + "1," * (MAX_NODES - 1) + "]") == [1] * (MAX_NODES - 1)


@given(st.text(max_size=200))
def test_any_text_is_a_value_or_a_config_error(text: str) -> None:
    with suppress(ConfigError):
        parse_text(text)


SCALARS = st.none() | st.booleans() | st.integers(-(10**18), 10**18) | st.text("abc xyz-_./", max_size=8)
PLAIN = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abc", min_size=1), inner, max_size=4)
)


@given(PLAIN)
def test_json_is_read_as_it_was_written(value: object) -> None:
    assert parse_text(json.dumps(value)) == value


def test_a_file_is_read_as_utf8(tmp_path: Path) -> None:
    file = tmp_path / "stack.yaml"
    file.write_bytes("name: \u00fc\n".encode())
    assert parse_text(read_text(file)) == {"name": "\u00fc"}


@pytest.mark.parametrize("raw", [b"a: \xff\xfe", "a: 1".encode("utf-16"), b"\x80"])
def test_a_file_that_is_not_utf8_is_refused(tmp_path: Path, raw: bytes) -> None:
    file = tmp_path / "stack.yaml"
    file.write_bytes(raw)
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_text(file)


def test_a_file_over_64_kib_is_refused_and_not_read_whole(tmp_path: Path) -> None:
    file = tmp_path / "stack.yaml"
    file.touch()
    os.truncate(file, 1 << 40)
    with pytest.raises(ConfigError, match="larger than 64 KiB"):
        read_text(file)


def test_a_missing_file_a_folder_a_pipe_and_a_device_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="does not exist"):
        read_text(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match="cannot be opened"):
        read_text("bad\0name")
    for place in (tmp_path, tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(ConfigError, match="not a regular file"):
            read_text(place)
