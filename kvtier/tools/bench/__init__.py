"""Measures the tiers of a stack file on this machine: bandwidth and latency of each, in separate temporary space.

run             a whole measurement, in temporary space on the file system of a root
measure         the GPU and the CPU tier, and a tier below them
load_generator  drives jobs and takes the time
results         the figures, as tables and JSON

`python -m benchmarks.*` reports the machine, percentiles and tables by the same code.
"""
