"""The simulator: a virtual clock, disks that misbehave and crash, and an oracle. See docs/simulator.md.

Production code runs in it unchanged: the control plane, the tier stack and the fs backend. What is simulated is the
event loop, the operating system under the fs backend, its threads and I/O engine, the CPU tier and the GPU.
"""
