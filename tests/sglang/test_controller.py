"""SGLang's real controller with kvtier below it: the bytes of each page come back, or it is a miss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support_controller import PAGE_TOKENS, Controller, extra_config

pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore")]  # what SGLang warns of is not ours

LAYOUTS = ["page_first", "page_first_direct", "layer_first"]
PROMPT = list(range(8 * PAGE_TOKENS))


@pytest.fixture
def controllers(tmp_path) -> Iterator[Callable[..., Controller]]:
    opened: list[Controller] = []

    def open_controller(layout: str = "page_first", mla: bool = False, pages: int = 32, **keys: Any) -> Controller:
        if keys.get("type") == "shared_fs":
            place = {"root": str(tmp_path / "kv")}
        else:
            place = {"roots": [str(tmp_path / "kv")]}
        opened.append(Controller(layout, pages, extra_config(**place, capacity="64MiB", **keys), mla))
        return opened[-1]

    yield open_controller
    for controller in opened:
        if controller.controller.enable_storage:
            controller.close()


@pytest.mark.parametrize("mla", [False, True], ids=["mha", "mla"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_come_back_bit_by_bit_also_after_a_restart(layout, mla, controllers):
    first = controllers(layout, mla)
    assert first.back_up(PROMPT) == len(PROMPT)
    assert first.prefetch(PROMPT) == (len(PROMPT), len(PROMPT), 0)
    first.close()
    second = controllers(layout, mla)
    longer = [*PROMPT[: 5 * PAGE_TOKENS], *[7] * (4 * PAGE_TOKENS)]
    assert second.prefetch(longer) == (5 * PAGE_TOKENS, 5 * PAGE_TOKENS, 0)
    assert second.prefetch(PROMPT) == (len(PROMPT), len(PROMPT), 0)
