"""`python -m simulator --seeds N --start K`: see `simulator.command`."""

from simulator.command import simulate

if __name__ == "__main__":
    simulate()
