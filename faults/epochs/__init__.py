"""Epochs of shared tiers, simulated: hosts that open, reset and end in any order over stores that forget and lie."""
