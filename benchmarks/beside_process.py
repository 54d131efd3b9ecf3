"""A neighbour's work in a process of its own, until its input ends; then its delays, as JSON."""

from __future__ import annotations

import json
import sys

from benchmarks.beside import Neighbour, nap, spin

if __name__ == "__main__":
    work = {each.__name__: each for each in (nap, spin)}[sys.argv[1]]
    with Neighbour(work) as neighbour:
        print(flush=True)
        sys.stdin.read()
    print(json.dumps(neighbour.delays))
