"""The shared region: rows, control area, and how processes open it; touched by the CPU tier and all who mapped it."""
