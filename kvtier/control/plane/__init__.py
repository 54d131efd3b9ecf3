"""The control plane itself, from the lookups and jobs it is handed to the deliveries of the data plane."""
