"""Replay: a small serving loop that drives a tier stack with a workload or a trace and checks every byte.

requests   what a request is, and the chain of keys over its blocks
trace      readers of request traces
workload   generated multi-turn workloads
content    what each block must hold, as a function of its key
pool       the loop's own GPU blocks and prefix cache
serve      the loop
report     the result: counts, table, JSON
"""
