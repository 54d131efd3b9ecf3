"""Values that are made for every job."""

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(field,))
def job_value(cls: type[T]) -> type[T]:
    """A slotted dataclass without `==` that is frozen for the type checker and not at run time.

    To make a frozen dataclass takes about five times as long, and each job of one block makes half a dozen values.
    """
    return dataclass(slots=True, eq=False)(cls)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def compared_value(cls: type[T]) -> type[T]:
    """`job_value` with `==` and a hash by its fields."""
    return dataclass(slots=True, unsafe_hash=True)(cls)
