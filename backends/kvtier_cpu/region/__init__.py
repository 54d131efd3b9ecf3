"""The shared region: its memory, its control area, and how processes open it together."""
