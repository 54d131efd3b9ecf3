"""Values of the engine: keys, geometry, namespaces, jobs, events. No behaviour beyond arithmetic."""
