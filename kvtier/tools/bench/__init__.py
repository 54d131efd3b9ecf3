"""Measures the tiers of a stack file on this machine: bandwidth and latency of each, in separate temporary space.

run             one whole measurement, in temporary space on the file system of a root
copies          the GPU and the CPU tier
lower_tier      a tier below them
load_generator  drives jobs and takes the time
results         the figures, as tables and JSON

`python -m benchmarks.*` reports the machine, percentiles and tables by the same code.
"""
