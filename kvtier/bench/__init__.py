"""What the tiers of a stack file do on this machine: bandwidth and latency of each, in space of its own.

`run` holds the course of a measurement, `tiers` opens and measures one tier, `moving` drives jobs and takes the time,
`content` fills and checks bytes, `places` finds temporary space, `report` shows figures.
"""
