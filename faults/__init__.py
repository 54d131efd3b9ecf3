"""The fault suite: attacks on the store, one row each, few in the test run and many on request.

`python -m faults` runs them at the normal counts, `--long` at the long ones, and prints a table of the outcome.
"""
