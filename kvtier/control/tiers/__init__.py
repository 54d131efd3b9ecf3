"""Each tier as its control plane has it: slots, presence, health, figures; changed by the plane's thread alone."""
