"""Where the pages of SGLang's host pools are: the bytes that SGLang's own accessors read and write."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support_controller import PAGE_TOKENS, pools

from kvtier.engines.engine_memory.memory import PagedMemory
from kvtier.engines.sglang.pools import HostPool
from kvtier.errors import ConfigError

pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore")]  # what SGLang warns of is not ours

PAGES = 7


@pytest.mark.parametrize("mla", [False, True], ids=["mha", "mla"])
@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "layer_first"])
def test_a_page_is_the_bytes_that_sglang_has_for_it(layout, mla):
    _, host = pools(layout, PAGES, mla)
    pool = HostPool.of("kv", host)
    memory = PagedMemory([[pieces.array() for pieces in pool.pieces]])
    assert pool.pages == host.page_num >= PAGES
    seen = []
    for page in range(pool.pages):
        content = torch.randint(0, 2**15, (host.get_dummy_flat_data_page().numel(),), dtype=torch.int16)
        host.set_from_flat_data_page(page * PAGE_TOKENS, content.view(host.dtype))
        found = b"".join(piece.tobytes() for piece in memory.pieces(0, page))
        assert len(found) == 2 * content.numel() == memory.block_bytes[0]
        assert sorted(found) == sorted(content.numpy().tobytes()), "the same bytes, in the order of the addresses"
        seen.append(found)
    for page, found in enumerate(seen):  # no page has bytes of another one
        assert found == b"".join(piece.tobytes() for piece in memory.pieces(0, page))
    for piece in memory.pieces(0, 3):
        piece[:] = 0
    assert not host.get_data_page(3 * PAGE_TOKENS).view(torch.int16).any()
    assert host.get_data_page(2 * PAGE_TOKENS).view(torch.int16).any()
    assert host.get_data_page(4 * PAGE_TOKENS).view(torch.int16).any()


def test_few_arrays_describe_a_page_of_many_layers():
    assert [len(HostPool.of("kv", pools(layout, PAGES)[1]).pieces) for layout in ("page_first", "layer_first")] == [
        1,
        1,
    ]


def test_indices_that_are_no_whole_pages_are_refused():
    pool = HostPool.of("kv", pools("page_first", PAGES)[1])
    whole = torch.cat([torch.arange(PAGE_TOKENS) + page * PAGE_TOKENS for page in (5, 2)])
    assert pool.places(whole, 2) == [5, 2]
    assert pool.places(whole, 1) is None
    assert pool.places(whole + 1, 2) is None
    assert pool.places(None, 2) is None


def pool_like(**changes: object) -> SimpleNamespace:
    """A pool of four pages whose addresses are as given."""
    given = {"layout": "page_first", "page_size": 1, "size": 4, "dtype": torch.uint8}
    given["get_page_buffer_meta"] = lambda indices: ([4096 + 64 * int(index) for index in indices], [64] * len(indices))
    return SimpleNamespace(**{**given, **changes})


def unsupported(indices: torch.Tensor) -> None:
    raise ValueError("mamba storage needs page_first")


WRONG = {
    "layout": ({"layout": "page_head"}, "host pool side: has the layout page_head; kvtier serves layer_first"),
    "no bytes": ({"get_page_buffer_meta": lambda indices: None}, "host pool side: keeps no bytes"),
    "no addresses": ({"get_page_buffer_meta": unsupported}, "gives no addresses of its pages: mamba storage needs"),
    "uneven": (
        {"get_page_buffer_meta": lambda indices: ([4096 + 64 * int(indices[0]) ** 2], [64])},
        "does not lay out all its pages alike",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_pool_that_cannot_be_served_is_refused_by_name(case):
    changes, said = WRONG[case]
    with pytest.raises(ConfigError) as raised:
        HostPool.of("side", pool_like(**changes))
    assert said in str(raised.value)
