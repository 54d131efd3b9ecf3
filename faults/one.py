"""One attack in this process, for the suite: `python -m faults.one NAME COUNT SEED FOLDER ANSWER [--long]`."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

from .attack import Budget
from .machine import warm
from .suite import PROJECT, all_attacks


def main(name: str, count: str, seed: str, folder: str, answer: str, *flags: str) -> None:
    """Run the attack and write its tally to the file `answer`, whole or not at all."""
    if warm.is_warm():
        warm.start()
    sys.path.insert(0, str(PROJECT / "tests" / "support"))
    warnings.simplefilter("error")
    attack = all_attacks()[name]
    tally = attack.attack(Budget(int(count), int(seed), Path(folder), "--long" in flags))
    part = Path(answer).with_suffix(".part")
    part.write_text(json.dumps(tally.as_json()))
    part.rename(answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
