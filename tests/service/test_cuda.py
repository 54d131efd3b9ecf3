"""Engines whose blocks are on a CUDA device, at a stack process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support_private import private_socket
from support_service import NAMESPACE, PAGE, TestEngine, block_keys, on_disk, stack_process, stack_text, until

from kvtier.config import parse_stack
from kvtier.engines.process_stack import ProcessStack, open_engine_stack
from kvtier.types.jobs import JobKind, JobResult
from kvtier.types.keys import RequestId

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
RUN = 32
LATE_CYCLES = 200_000_000
"""Of a kernel that only waits: about a tenth of a second."""


def test_blocks_come_back_from_rows_from_the_disk_and_after_a_kill(tmp_path: Path) -> None:
    """Engines on a device and one in host memory share rows, which the former have pinned, each for itself."""
    stack, path = tmp_path / "stack.yaml", str(tmp_path / "socket")
    figures = str(tmp_path / "figures")
    stack.write_text(stack_text(root=tmp_path / "root", stats_socket=figures))
    runs = [range(first, first + RUN) for first in range(0, 512, RUN)]
    with stack_process(stack, path) as process, TestEngine(path, device="cuda") as one:
        assert "pinned rows" in one.client._worker._gpu._open.engine.mode
        assert one.store(runs[0]) == ["stored"] * RUN
        with TestEngine(path, device="cuda") as two, TestEngine(path) as on_host:
            for engine in (one, two, on_host):
                assert engine.load(runs[0]) == ["hit"] * RUN
            for run in runs[1:]:
                assert two.store(run) == ["stored"] * RUN
            for number, run in enumerate(runs):
                assert one.load(run, f"r{number}") == ["hit"] * RUN
            until(lambda: on_disk(figures) >= RUN * len(runs), "the disk has them")
        process.kill()
        one.step_until(lambda: not one.client.core.connected, "the end is seen")
        assert one.load(range(8), "after") == ["missing"] * 8
        process.wait()
        with stack_process(stack, path):
            one.step_until(lambda: one.client.core.joined, "it is connected again")
            for number, run in enumerate(runs):
                assert one.load(run, f"again {number}") == ["hit"] * RUN
            assert one.store(range(2000, 2000 + RUN)) == ["stored"] * RUN
            assert one.load(range(2000, 2000 + RUN), "more") == ["hit"] * RUN


@pytest.mark.parametrize("kind", [JobKind.STORE, JobKind.LOAD])
def test_a_copy_waits_for_what_the_device_was_given_before(kind: JobKind, folder: str) -> None:
    """On any stream of the engine. A store takes what that work computes; a load comes after it."""
    with TestEngine(private_socket(stack_text(), folder), device="cuda") as engine:
        assert engine.store(range(16)) == ["stored"] * 16
        wanted = 16 if kind is JobKind.STORE else 0
        engine.step_until(lambda: len(engine.client.core._lent) >= 16, "rows are lent")
        request = None if kind is JobKind.STORE else engine.reserve(range(16), "r")
        right = torch.full_like(engine.cache[:16], 77)
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(LATE_CYCLES)
            engine.cache[:16] = right
            job = engine.begin(kind, range(wanted, wanted + 16), request)
        assert set(engine.finish(job)) == {"stored" if kind is JobKind.STORE else "loaded"}
        if kind is JobKind.LOAD:
            assert [int(block[0]) for block in engine.cache[:16].cpu()] == list(range(16))
            return
        engine.cache.zero_()
        request = engine.reserve(range(16, 32), "back")
        assert engine.transfer(JobKind.LOAD, range(16, 32), request) == ["loaded"] * 16
        assert torch.equal(engine.cache[:16], right)


def test_a_process_of_its_own_is_the_usual_one(folder: str) -> None:
    config = parse_stack(stack_text(runtime_dir=folder))
    tensor = torch.arange(16, dtype=torch.uint8, device="cuda").repeat_interleave(PAGE).view(16, PAGE)
    with open_engine_stack(config, NAMESPACE, [tensor]) as stack:
        assert isinstance(stack, ProcessStack)
        keys, found = block_keys(8), dict[int, JobResult]()

        def finish(job: int) -> bool:
            while job not in found:
                found.update({result.job_id: result for result in stack.step()})
                stack.wait(0.05)
            return found[job].ok

        while not finish(stack.submit_store(keys, gpu_blocks=range(8))):  # until rows are lent
            found.clear()
        with stack.request(RequestId("r"), keys) as request:
            reservation = request.reserve(keys)
            while not reservation.served:
                stack.step()
                stack.wait(0.05)
            assert list(reservation.hits()) == [True] * 8
            assert finish(stack.submit_load(keys, request, gpu_blocks=range(8, 16)))
    assert torch.equal(tensor[8:].cpu(), tensor[:8].cpu())
