"""Replay: a small serving loop that drives a tier stack with a workload or a trace and checks every byte.

setup      from options to a source of requests, a layout and a stack
workload   generated multi-turn workloads
content    the expected content of each block, a function of its key
engine     KV tensors, and a pool of blocks, a store planner and the content for each group
serve      the loop
service_stack  the stack of a `kvtier serve`, for the loop
timeline   a run over time, for a page, and the loop that makes it
run        one whole replay
report     the result: counts, table, JSON
"""
