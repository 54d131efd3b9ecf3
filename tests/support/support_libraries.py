"""Stack files where the client library of a tier is not installed."""

from __future__ import annotations

import ast
import subprocess
import sys
from typing import NamedTuple

_CODE = """
import importlib.util, sys
module, text = sys.argv[1:]
sys.modules[module] = None  # as if it were not installed
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == module else find(name, *more)
from kvtier.config import build_tiers, parse_stack
from kvtier.config.layout import read_layout
from kvtier.config.plan import plan_stack
tiers = build_tiers(parse_stack(text))
layout = read_layout("full:page=32KiB,block=16").layout()
for probe in (False, True):
    plan, problems = plan_stack(tiers, layout, probe=probe)
    print((plan.tiers[2].notes, [str(problem) for problem in problems]))
"""


class Planned(NamedTuple):
    """The notes and the problems of a tier in the plan of a stack."""

    notes: tuple[str, ...]
    problems: list[str]


def planned_without(module: str, tier: str) -> list[Planned]:
    """What a plan says of a tier below the CPU, without and with a probe, in a process that cannot import a module.

    A process of its own, because others have imported it here.
    """
    text = f"tiers: [{{type: gpu}}, {{type: cpu, cpu_bytes_to_use: 1GiB}}, {tier}]"
    done = subprocess.run(
        [sys.executable, "-c", _CODE, module, text], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return [Planned(*ast.literal_eval(line)) for line in done.stdout.splitlines()]
