"""Sizes as people write them, and options that refuse what they do not know."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from kvtier.options import ByteSize, LowerTierOptions, OwnedTierOptions, TierOptions, parse_size

BINARY = {"KiB": 1, "MiB": 2, "GiB": 3, "TiB": 4, "PiB": 5}
DECIMAL = {"KB": 1, "MB": 2, "GB": 3, "TB": 4, "PB": 5}


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("64GiB", 64 << 30),
        ("64 GiB", 64 << 30),
        ("1.5TiB", 3 << 39),
        ("500GB", 500 * 10**9),
        ("4096", 4096),
        ("4096B", 4096),
        (4096, 4096),
        ("0.000001 MB", 1),
        ("0.5 B", 0),
    ],
)
def test_a_size_is_bytes_or_a_number_with_a_unit(text: object, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@given(st.integers(0, 10**6), st.sampled_from([*BINARY, *DECIMAL]))
def test_units_are_powers_of_1024_with_an_i_and_of_1000_without(count: int, unit: str) -> None:
    scale = 1024 ** BINARY[unit] if unit in BINARY else 1000 ** DECIMAL[unit]
    assert parse_size(f"{count}{unit}") == count * scale
    assert parse_size(f"{count}.5 {unit}") == count * scale + scale // 2


NOT_SIZES = [
    "10 bananas",
    "",
    " 1GiB",
    "1GiB ",
    "1  GiB",
    "-1GiB",
    "1e9",
    "GiB",
    "1gib",
    "1G",
    "0x10",
    "1,000",
    "1_000",
]
NOT_SIZES += [".5GiB", "1.GiB", "\u0661GiB", "9" * 19]


@pytest.mark.parametrize("text", [*NOT_SIZES, 1.5, True, None, [1], {}])
def test_anything_else_is_refused_with_what_is_accepted(text: object) -> None:
    with pytest.raises(ValueError, match="is not a size; write a whole number of bytes or a number with KiB, MiB"):
        parse_size(text)


@pytest.mark.parametrize("value", [0, "0", "0GiB", "0.5B", -1])
def test_a_byte_size_is_never_zero_or_less(value: object) -> None:
    with pytest.raises(ValidationError, match="greater than 0"):
        TypeAdapter(ByteSize).validate_python(value)


@given(st.from_regex(r"[0-9]{1,6}(\.[0-9]{1,3})? ?[KMGTP]i?B", fullmatch=True))
def test_the_schema_accepts_what_the_parser_accepts(text: str) -> None:
    pattern = TypeAdapter(ByteSize).json_schema()["anyOf"][1]["pattern"]
    parse_size(text)
    assert re.search(pattern, text)


def test_options_are_strict_and_immutable_and_know_their_keys() -> None:
    with pytest.raises(ValidationError, match="Extra inputs"):
        TierOptions.model_validate({"type": "cpu", "nmae": "x"})
    with pytest.raises(ValidationError, match="valid string"):
        TierOptions.model_validate({"type": 5})
    options = TierOptions(type="cpu", name="warm")
    with pytest.raises(ValidationError, match="frozen"):
        options.name = "cold"  # type: ignore[misc]


@pytest.mark.parametrize("name", ["a b", "a/b", "a\n", "\u00e9", "x" * 65])
def test_a_tier_name_fits_in_tables_and_metrics(name: str) -> None:
    with pytest.raises(ValidationError):
        TierOptions(type="cpu", name=name)


def test_a_lower_tier_has_sane_defaults_and_bounds() -> None:
    options = OwnedTierOptions(type="fs")
    assert (options.policy, options.write_policy) == ("lru", "write_through")
    assert options.job_timeout_seconds > 0
    for wrong in ({"job_timeout_seconds": 0}, {"job_timeout_seconds": float("inf")}, {"inflight_bytes": 0}):
        with pytest.raises(ValidationError):
            LowerTierOptions.model_validate({"type": "fs", **wrong})
