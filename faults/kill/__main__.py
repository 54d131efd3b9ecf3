"""One kill row in a lean process of its own: `python -m faults.kill ROW COUNT SEED FOLDER`; prints its tally."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ..attack import Tally
from .cycles import Cycles
from .late import LateWrites
from .stale import StaleSnapshots
from .steps import ResetSteps
from .victim import die_with_parent


def main(row: str, count: str, seed: str, folder: str) -> None:
    """Run a row and print what came of it."""
    die_with_parent()
    tally, number, home = Tally(), int(seed), Path(folder)
    match row.split():
        case ["kill", layout]:
            Cycles(layout, home, number, tally).run(int(count))
        case ["late", layout]:
            LateWrites(layout, home, number, tally).run(int(count))
        case ["stale"]:
            StaleSnapshots(home, number, tally).run(int(count))
        case ["reset", part]:
            ResetSteps(home, number, tally).run(int(count), int(part))
    print(json.dumps(tally.as_json()))


if __name__ == "__main__":
    main(*sys.argv[1:])
