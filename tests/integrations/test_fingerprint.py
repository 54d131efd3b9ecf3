"""What modules compute with, besides weights, decides their fingerprint."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from kvtier.engines.fingerprint import computed_state, computing_modules


class Rotary(nn.Module):
    """A rotary embedding with two tables, as longrope has."""

    def __init__(self, base: float = 10000.0, use_long: bool = False) -> None:
        super().__init__()
        self.use_long = use_long
        self.style = ("neox", 2)
        frequencies = 1.0 / base ** (torch.arange(0, 8, 2, dtype=torch.float) / 8)
        self.register_buffer("inv_freq", frequencies, persistent=False)
        self.register_buffer("seen", torch.zeros(2))


class Model(nn.Module):
    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.rotary = rotary


def state(model: nn.Module) -> str:
    return computed_state(computing_modules(model))


def change_table(model: Model) -> None:
    model.rotary.inv_freq[3] += 1e-6


def change_type(model: Model) -> None:
    model.rotary.inv_freq = model.rotary.inv_freq.double()


def change_style(model: Model) -> None:
    model.rotary.style = ("neox", 4)


CHANGES: dict[str, Callable[[Model], None]] = {
    "one value of a table": change_table,
    "type of a table": change_type,
    "plain value": lambda model: setattr(model.rotary, "use_long", True),
    "value in a tuple": change_style,
    "name": lambda model: setattr(model, "other", model.__dict__["_modules"].pop("rotary")),
    "another module with a table": lambda model: setattr(model, "second", Rotary()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_of_what_is_computed_with_shows(change):
    model = Model(Rotary())
    before = state(model)
    change(model)
    assert state(model) != before


def test_equal_models_have_equal_state_and_weights_do_not_count():
    one, other = Model(Rotary()), Model(Rotary())
    with torch.no_grad():
        other.linear.weight += 1
        other.rotary.seen += 1
    assert state(one) == state(other)


def test_another_class_shows():
    class Reversed(Rotary):
        pass

    assert state(Model(Rotary())) != state(Model(Reversed()))


def test_a_model_without_tables_has_a_state():
    assert state(nn.Linear(2, 2)) == state(nn.Linear(3, 3))
