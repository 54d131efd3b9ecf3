"""The outcome of a row, and the page docs/models.md that has all of them. Needs no vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import date
from textwrap import fill

from families import SGLANG, SGLANG_DAY, SGLANG_RELEASE, Row, gpu_rows, rows

ENOUGH = 0.96
LOGPROB_MAX = 1e-3


@dataclass(frozen=True)
class Restored:
    """One row's outcome: the tokens that each tier restored, of `possible` in full blocks, and what differed.

    `unequal` names the answers with other tokens than without a connector, `own` is what vLLM's prefix cache gave.
    `logprob` is the largest difference of the log-probabilities, and `scatter` that of vLLM's own answers: with nothing
    restored, from its own cache, to prompts that share no batch.
    """

    tokens: dict[str, int]
    possible: int
    unequal: list[str]
    logprob: float
    control: bool
    own: int
    own_is_equal: bool
    scatter: float = 0.0

    def cell(self) -> str:
        """The row as the page has it: per cent from CPU tier, disk and Valkey, and the difference."""
        shares = "/".join(f"{100 * found / self.possible:.0f}" for found in self.tokens.values())
        return f"{shares} {'differ' if self.unequal else f'{self.logprob:.0e}'}"

    def faults(self, exception: str) -> list[str]:
        """What makes the row red. One with an exception restores less, or differs as with vLLM's own cache."""
        found = [] if self.control else ["the control: another context leaves an output as it was"]
        if exception and not self.own_is_equal:
            return found
        found += [f"{name}: other tokens than without a connector" for name in self.unequal]
        if self.logprob > LOGPROB_MAX >= self.scatter:  # without AVX-512 bfloat16 depends on what shares a batch
            found.append(f"log-probabilities differ by {self.logprob:.1e}")
        enough = all(tokens >= ENOUGH * self.possible for tokens in self.tokens.values())
        if enough == bool(exception):
            found.append(f"restored {self.tokens} of {self.possible}: {'no exception' if enough else 'too little'}")
        return found


@dataclass
class Table:
    """Cells by release and row. A release is followed by the day on which all its rows were run."""

    rows: dict[str, Row]
    cells: dict[str, dict[str, str]] = field(default_factory=dict)

    def read(self, text: str) -> None:
        """Take in the table of a part of a page."""
        lines = [line[1:-1].split("|") for line in text.splitlines() if line.startswith("|")]
        for at, head in enumerate(lines[0][2:] if lines else (), 2):
            self.cells[head] = {line[0]: line[at] for line in lines[2:]}

    def note(self, release: str, found: dict[str, str]) -> None:
        """Take in cells of a release. All rows at once are a new column with the date of today."""
        head = next((head for head in self.cells if head.startswith(release)), "")
        if found.keys() >= self.rows.keys() or not head:
            self.cells.pop(head, None)
            head = f"{release}, {date.today():%-d %B %Y}"
        self.cells.setdefault(head, {}).update(found)

    def text(self) -> str:
        """The table in Markdown, in the order of the rows."""
        heads = sorted(self.cells)
        lines = [["model", "keeps", *heads], ["-"] * (2 + len(heads))]
        lines += [
            [name, row.family.keeps, *(self.cells[head].get(name, "") for head in heads)]
            for name, row in self.rows.items()
        ]
        return "\n".join(f"|{'|'.join(line)}|" for line in lines)


@dataclass
class Page:
    """The page: the rows that run here, and those that need a GPU."""

    here: Table
    gpu: Table

    @classmethod
    def read(cls, text: str) -> Page:
        """The page as it is; an empty one has no cells."""
        found = cls(Table(rows()), Table(gpu_rows()))
        here, _, gpu = text.partition(GPU_HEADING)
        found.here.read(here)
        found.gpu.read(gpu)
        return found

    def text(self) -> str:
        """All of it in Markdown."""
        listed = {**self.here.rows, **self.gpu.rows}.values()
        exceptions = "\n".join(f"- {row.name}: {row.exception}" for row in listed if row.exception)
        sglang = f"{SGLANG_RELEASE}, {SGLANG_DAY}: {', '.join(SGLANG)}"
        return TEXT.format(here=self.here.text(), gpu=self.gpu.text(), exceptions=exceptions, sglang=fill(sglang, 120))


GPU_HEADING = "\n## What needs a GPU\n"
TEXT = """# Models

Does a prompt come back from each tier, and are the outputs those of vLLM alone? Each row is a small model with random
weights in the real vLLM on a CPU. Seven prompts of 300 to 1,500 tokens are asked five times: without a connector; with
kvtier, cold; with vLLM's own cache emptied, from the CPU tier; from the disk in a new engine; from Valkey in another.

A cell has what came back from the CPU tier, the disk and Valkey, in per cent of the full blocks (chunks, if a row has
these), and the largest difference of a log-probability from vLLM alone; `differ` where tokens differ. A row counts only
if other words in the first three quarters of each prompt change its output. It fails below 96 % or above a difference
of 0.001. The connector is `KVTierConnector` ([vllm.md](vllm.md#options)).

In the environment of [vllm.md](vllm.md#tests-against-the-real-vllm):

```text
python tests/vllm/family_table.py 'llama, LoRA'                  # a row, in a minute
python tests/vllm/family_table.py --write docs/models.md         # all rows, and this page
python tests/vllm/family_table.py --gpu                          # the rows that need a GPU, in ten minutes
```

{here}

The rows are in `tests/vllm/families.py`. `.ci/run --all` runs them on vLLM 0.33 too (its Python beside the compiled
parts of 0.32, `tests/vllm/overlay.py`). Rows that keep states run in one process, as with one GPU; Mamba 2 also with
`compute_mamba_in_steps` (`tests/vllm/support_engine.py`), because on a CPU vLLM does not store a state within a step.

## Exceptions

{exceptions}
- MLA on a CPU without AMX: vLLM does not continue after a prefix (`tests/vllm/test_mla.py`)

## SGLang and LMCache

`tests/sglang/test_families.py` asks prompts of 300, 700 and 1,100 tokens of the real SGLang on a CPU: every whole page
comes back from the disk after a flush, and in a new server, with equal tokens and log-probabilities.

{sglang}

SGLang computes no windows and no states on a CPU. LMCache has no engine there: its server stores and loads objects of
any family alike (`tests/lmcache`).
"""
TEXT += GPU_HEADING
TEXT += """
One GPU; the last row needs two. A row without a cell was not run.

{gpu}
"""
