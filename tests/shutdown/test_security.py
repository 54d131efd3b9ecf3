"""What docs/security.md promises beyond what other tests defend, and that the tests it names exist."""

from __future__ import annotations

import os
import re

import pytest
from support_paths import PROJECT
from support_stack import JUNK, Engine, fs, keys, parts_of, stack_file, statuses, store, whole

from kvtier.stack import TierStack
from kvtier.types.geometry import GroupLayout, KVLayout, TensorRef

ROOT = PROJECT
ODD = KVLayout((GroupLayout((TensorRef(0, 1000),)), GroupLayout((TensorRef(1, 9000),))))


def test_every_test_that_the_security_page_names_exists():
    page = (ROOT / "docs" / "security.md").read_text()
    named = re.findall(r"`tests/([\w/]+)\.py::(test_\w+)`", page)
    assert len(named) > 20
    for module, name in named:
        source = (ROOT / "tests" / f"{module}.py").read_text()
        assert re.search(rf"^(async )?def {name}\(", source, re.MULTILINE), f"{module}.py has no {name}"


async def test_no_byte_of_an_earlier_tenant_reaches_the_disk(tmp_path):
    """Rows full of somebody else's bytes, blocks that leave room in every row: the disk sees none of it."""
    engine = Engine(ODD, 32)
    stack = TierStack(parts_of(stack_file(ODD, 16, fs(tmp_path / "r")), engine))
    async with stack:
        stack._parts.tiers[1].rows.view[:] = JUNK
        groups = whole(keys(6)), whole(keys(6, group=1), 8)
        result = await store(stack, engine, *groups)
        assert set(statuses(result)) == {"stored"}
        assert await stack.drain(20)
        assert stack.stats().tiers["fs"].stored == 12
    for path in (tmp_path / "r").iterdir():
        assert bytes([JUNK]) * 32 not in path.read_bytes(), path.name


async def test_the_rows_have_no_name(tmp_path):
    engine = Engine(ODD, 32)
    async with TierStack(parts_of(stack_file(ODD, 16, fs(tmp_path / "r")), engine)) as stack:
        for fd in stack._parts.tiers[1].rows.descriptors:
            assert os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:kvtier-")
            assert not os.get_inheritable(fd)


@pytest.mark.parametrize("where", ["kvtier", "backends"])
def test_nothing_is_unpickled_or_evaluated(where):
    found = re.compile(
        r"\b(pickle|marshal|shelve|dill)\b|(?<!\.)\b(eval|exec)\(|np\.load\(|torch\.load\(|yaml\.(unsafe_)?load\("
    )
    for path in sorted((ROOT / where).rglob("*.py")):
        assert not found.search(path.read_text()), path
