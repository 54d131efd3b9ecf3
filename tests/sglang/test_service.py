"""SGLang at a `kvtier serve`: pages and prompts that one stored are found by another, with equal bytes and tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support_controller import PAGE_TOKENS, Controller, extra_config
from support_service import PAGE, end, stack_process, stack_text
from support_sglang import make_model, server
from test_serving import PROMPT, WHOLE, backed_up, prompt

from kvtier.errors import ConfigError

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(3600), pytest.mark.filterwarnings("ignore")]

PAGES = list(range(8 * PAGE_TOKENS))


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "stack.yaml"
    path.write_text(stack_text((64 << 20) // PAGE, tmp_path / "root"))
    return path


@pytest.fixture
def socket(file, tmp_path) -> Iterator[str]:
    path = str(tmp_path / "socket")
    with stack_process(file, path):
        yield path


@pytest.mark.parametrize("mla", [False, True], ids=["mha", "mla"])
@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_pages_of_one_controller_come_back_bit_by_bit_in_another(layout, mla, socket):
    first, second = (Controller(layout, 32, extra_config(service=socket), mla) for _ in range(2))
    try:
        assert first.back_up(PAGES) == len(PAGES)
        assert second.prefetch(PAGES) == (len(PAGES), len(PAGES), 0)
        longer = [*PAGES[: 5 * PAGE_TOKENS], *[7] * (4 * PAGE_TOKENS)]
        assert second.prefetch(longer) == (5 * PAGE_TOKENS, 5 * PAGE_TOKENS, 0)
        assert second.backend.clear()
        assert first.prefetch(PAGES) == (0, 0, 0)
    finally:
        first.close()
        second.close()


def test_keys_of_a_tier_beside_a_service_are_refused_by_name(socket):
    with pytest.raises(ConfigError, match="capacity: is no key beside service"):
        Controller("page_first", 32, extra_config(service=socket, capacity="64MiB"))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "llama")


def test_two_servers_share_a_service_and_outlive_it(model, file, tmp_path):
    path = str(tmp_path / "socket")
    config = extra_config(service=path, prefetch_threshold=PAGE_TOKENS)
    for number in range(2):
        (tmp_path / f"server-{number}").mkdir()
    with (
        stack_process(file, path) as service,
        server(model, tmp_path / "server-0", config) as first,
        server(model, tmp_path / "server-1", config) as second,
    ):
        computed = first.ask(PROMPT)
        assert (computed.cached, len(computed.tokens)) == (0, 8)
        backed_up(first, WHOLE)
        found = second.ask(PROMPT)
        assert (found.cached, found.from_storage, found.tokens) == (WHOLE, WHOLE, computed.tokens)
        end(service)
        second.flush()
        gone = second.ask(PROMPT)
        assert (gone.from_storage, gone.tokens) == (0, computed.tokens)
        with stack_process(file, path):

            def stored_and_found() -> bool:
                first.ask(prompt(1))
                second.flush()
                again = second.ask(prompt(1))
                return bool(again.from_storage == WHOLE)

            second.until(stored_and_found, "the next service was not used")
            first.flush()
            second.flush()
            assert first.ask(PROMPT).tokens == second.ask(PROMPT).tokens == computed.tokens


def test_two_ranks_of_tensor_parallelism_find_their_own_pages_at_one_service(model, socket, tmp_path):
    config = extra_config(service=socket, prefetch_threshold=PAGE_TOKENS)
    with server(model, tmp_path, config, **{"tp-size": 2}) as running:
        computed = running.ask(PROMPT)
        backed_up(running, WHOLE)
        running.flush()
        stored = running.ask(PROMPT)
        assert (stored.cached, stored.from_storage, stored.tokens) == (WHOLE, WHOLE, computed.tokens)
