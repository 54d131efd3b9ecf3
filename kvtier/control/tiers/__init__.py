"""What the control plane knows of each tier: slots, placement, hints, health."""
