"""Hints of applications: blocks retained, prefetched, demoted early; called by the plane, pin rows and call `flow`."""
