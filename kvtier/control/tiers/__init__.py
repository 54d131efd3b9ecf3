"""The tiers as the control plane sees them: slots, placement, presence, health; touched by the plane's flows."""
