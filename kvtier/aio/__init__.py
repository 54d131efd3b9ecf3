"""Building blocks without KV blocks: waits, threads, turns of a loop, forks, locks, a clock; any room may use them."""
