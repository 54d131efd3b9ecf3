"""Policies of other packages: found by entry points when they are named, and refused in one line when they are bad."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from support_backends import add_distribution
from support_following import FollowingLRU, Notes

from faults.stepped import SteppedStack
from kvtier.config import parse_stack, stack_parts
from kvtier.errors import ConfigError
from kvtier.policy import POLICIES, RequestPolicy
from kvtier.policy.arc import ARC
from kvtier.stack.learned.installed_policies import Policies, find_policy
from kvtier.types.geometry import KVLayout
from kvtier.types.keys import OffloadKey, RequestId, make_key

PAGE = 4096
Install = Callable[[dict[str, str]], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a distribution that brings policies, for one test."""
    numbers = iter(range(100))

    def add(points: dict[str, str]) -> None:
        site = tmp_path / f"site{next(numbers)}"
        add_distribution(site, f"{site.name}-policies", points, group=Policies.GROUP)
        monkeypatch.setattr(sys, "path", [str(site), *sys.path])

    return add


class Unfinished(RequestPolicy):
    """Implements nothing."""


class WithoutModel(FollowingLRU):
    """Says nothing good of its model."""

    MODEL = int  # type: ignore[assignment]


def fault(name: str) -> str:
    with pytest.raises(ConfigError) as caught:
        find_policy(name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_kvtiers_own_policies_need_no_metadata() -> None:
    def points() -> Iterator[EntryPoint]:
        raise AssertionError("the metadata was read")
        yield

    assert find_policy("arc", points()) is ARC


def test_a_policy_of_another_package_is_found_by_its_name(install: Install) -> None:
    install({"following": "support_following:FollowingLRU"})
    assert find_policy("following") is FollowingLRU


def test_an_unknown_name_lists_what_there_is(install: Install) -> None:
    install({"following": "support_following:FollowingLRU"})
    known = ", ".join(sorted([*POLICIES, "following"]))
    assert fault("folowing") == f"policy: no policy is called 'folowing'; did you mean 'following'? (known: {known})"


def test_bad_policies_are_named_with_their_distribution(install: Install) -> None:
    install(
        {
            "absent": "no_such_module:Policy",
            "function": "kvtier.stack.learned.installed_policies:find_policy",
            "unfinished": f"{__name__}:Unfinished",
            "modelless": f"{__name__}:WithoutModel",
        }
    )
    sys.modules.setdefault(__name__, sys.modules[Unfinished.__module__])
    assert "of site0-policies 1.0 cannot be loaded: ModuleNotFoundError" in fault("absent")
    assert fault("function").endswith("is no subclass of kvtier.policy.EvictionPolicy")
    assert "leaves __init__, admit," in fault("unfinished")
    assert fault("modelless").endswith("has no MODEL that is a subclass of kvtier.policy.RequestModel")


def test_a_name_that_two_distributions_claim_is_refused(install: Install) -> None:
    install({"following": "support_following:FollowingLRU"})
    install({"following": "support_following:FollowingLRU"})
    assert "claimed by site0-policies 1.0 and site1-policies 1.0" in fault("following")


def test_a_stack_file_with_an_unknown_policy_is_refused_with_the_path_of_the_key() -> None:
    with pytest.raises(ConfigError, match=r"^tiers\[0\]\.policy: no policy is called 'fifo' \(known: arc, lru"):
        parse_stack("tiers: [{type: cpu, cpu_bytes_to_use: 1MiB, policy: fifo}]")


def following_stack(tensor: torch.Tensor, rows: int = 8) -> SteppedStack:
    text = f"tiers: [{{type: gpu}}, {{type: cpu, cpu_bytes_to_use: {rows * PAGE}, policy: following}}]"
    layout = KVLayout.of_pages(PAGE, block_size=16)
    return SteppedStack(stack_parts(parse_stack(text), layout, [tensor], model="m"))


def names(*numbers: int) -> list[OffloadKey]:
    return [make_key(number.to_bytes(16, "big"), 0) for number in numbers]


def test_a_stack_runs_with_it_and_passes_on_requests_with_the_time_of_the_caller(install: Install) -> None:
    install({"following": "support_following:FollowingLRU"})
    stack = following_stack(torch.zeros((4, PAGE), dtype=torch.uint8))
    with stack:
        for number, time in enumerate((50.0, 20.0, 60.0)):
            request = stack.request(RequestId(str(number)), names(1, 2), time=time)
            stack.submit_store(names(1, 2), gpu_blocks=[0, 1])
            while stack.has_pending_work:
                stack.wait(1.0)
                stack.step()
            request.touch(names(1, 2))
            request.extend(names(3 + number))
            request.end(number)
        assert stack._assembled is not None
        models = stack._assembled.plane.control.models
        (model,) = models
        assert isinstance(model, Notes)
        assert [use.time for use in model.uses] == [50.0, 50.0, 60.0]
        assert [use.new_blocks for use in model.uses] == [2, 0, 0]
        request.extend(names(9))  # it has ended
        assert model.told("extend") == [(str(number), 0, names(3 + number)) for number in range(3)]
        assert model.told("end") == [("0", 0), ("1", 1), ("2", 2)]
        stack.check_integrity()
