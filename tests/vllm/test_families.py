"""The table of families (docs/models.md): each row is run as the page says; six of them always, all with `-m long`."""

from __future__ import annotations

from pathlib import Path

import pytest
from families import rows
from family_table import measure

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]
ALWAYS = {"llama", "qwen3_moe", "gemma3", "gpt_oss", "qwen3_next", "llama, fp8 keys and values"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ALWAYS else pytest.mark.long) for name in rows()]
)
def test_prompts_come_back_from_every_tier(name, tmp_path):
    row = rows()[name]
    if row.engine.get("kv_cache_dtype") == "fp8" and not {"avx512f", "amx_tile"} & set(
        Path("/proc/cpuinfo").read_text().split()
    ):
        pytest.skip("vLLM keeps fp8 only on a CPU with AVX-512 or AMX")
    found = measure(row, tmp_path)
    print(name, found)
    assert not found.faults(row.exception)
