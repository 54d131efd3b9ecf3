"""Values for all rooms: keys, geometry, dtypes, namespaces, jobs, requests, hints, events; arithmetic, imports none."""
