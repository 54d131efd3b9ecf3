"""What the tiers of a stack file do on this machine: bandwidth and latency of each, in space of its own.

`run` holds the course of a measurement, `copies` measures the GPU and the CPU tier, `lower` one below them, `moving`
drives jobs and takes the time, `content` fills and checks bytes, `places` finds temporary space, `figures` are what was
found and `report` shows them.
"""
