"""Values of the engine: keys, geometry, namespaces, jobs, hints, events; arithmetic only, imported everywhere."""
