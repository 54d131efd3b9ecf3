"""Random operations of SGLang's real controller while everything below goes wrong: never a wrong page, never a hang."""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest
from support_controller import PAGE_TOKENS, Controller, extra_config
from support_faulty_tiers import CHANCES

from kvtier.testing.faults import SeededFaults

pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore")]  # what SGLang warns of is not ours

OPERATIONS = 2000
PAGES = 48
LIMIT_SECONDS = 0.5
"""After this SGLang gives a prefetch up."""
CALL_SECONDS = 2.0
"""The longest that a call of the backend may take here, as configured."""


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_no_page_is_ever_wrong(layout, faulty, tmp_path, seed):
    rng = random.Random(seed)
    place = {"roots": [str(tmp_path / "kv")], "capacity": "8MiB", "lease_seconds": 0.5}
    limits = {"load_timeout_seconds": CALL_SECONDS, "store_timeout_seconds": CALL_SECONDS}
    controller = Controller(layout, PAGES, extra_config(**place, **limits))
    tree = [list(range(PAGE_TOKENS))]
    counts: Counter[str] = Counter()
    slowest = 0.0
    for number in range(OPERATIONS // 2):
        if number % 100 == 0:
            faulty[-1].plan = SeededFaults(seed + number, CHANCES if number % 300 else [])
        if rng.random() < 0.05:
            controller.backend._tier.thread.call_soon(faulty[-1].release)
        prompt = _prompt(rng, tree)
        began = time.monotonic()
        if rng.random() < 0.5:
            stored = controller.back_up(prompt)
            counts["stored"] += stored // PAGE_TOKENS
        elif rng.random() < 0.02:
            controller.backend.clear()
            counts["clear"] += 1
        else:
            found, loaded, wrong = controller.prefetch(prompt, LIMIT_SECONDS)
            assert not wrong, f"operation {number}: {wrong} wrong pages"
            counts["found"] += found // PAGE_TOKENS
            counts["loaded"] += loaded // PAGE_TOKENS
        slowest = max(slowest, time.monotonic() - began)
    counts["faults"] = faulty[-1].injected.total()
    print(dict(counts), f"slowest {slowest:.2f} s")
    controller.backend._tier.thread.call_soon(faulty[-1].release)
    controller.close()
    assert counts["faults"] > 30
    assert counts["loaded"] > 100
    assert counts["found"] > counts["loaded"], "faults hit loads"


def _prompt(rng: random.Random, tree: list[list[int]]) -> list[int]:
    """A prompt that shares its front with an earlier one."""
    base = rng.choice(tree)
    front = base[: rng.randint(0, len(base) // PAGE_TOKENS) * PAGE_TOKENS]
    prompt = [*front, *(rng.randrange(1000) for _ in range(rng.randint(1, 4) * PAGE_TOKENS))][: 16 * PAGE_TOKENS]
    if rng.random() < 0.5:
        return list(base)
    tree.append(prompt)
    del tree[:-40]
    return prompt
