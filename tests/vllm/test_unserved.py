"""The line in the log where requests load nothing of what is stored, and its reasons."""

from __future__ import annotations

import pytest
from engines import engine, make_model, total
from test_shared_prefixes import HYBRID, one_by_one, sharing, two_tiers

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]


def test_requests_that_share_a_prefix_below_vllms_connector_get_one_line_with_what_to_set(root, tmp_path):
    model = make_model("gemma3", tmp_path / "gemma3")
    asked = sharing(105, shared=400, length=700)
    with engine(model, tmp_path, two_tiers(root), **HYBRID) as vllm:
        _, cached = one_by_one(vllm, asked)
        figures = vllm.metrics()
        lines = [line for line in vllm.log.read_text(errors="replace").splitlines() if "nothing_loaded" in line]
    assert cached == [0] * len(asked)
    (line,) = lines
    assert "requests=100" in line
    assert "set kv_connector: KVTierConnector" in line
    assert total(figures, "kvtier_group_blocks_total", "direction=load") == 0
    assert total(figures, "kvtier_group_blocks_total", "direction=store") >= len(asked)
