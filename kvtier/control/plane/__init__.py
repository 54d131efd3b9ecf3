"""The control plane itself: lookups and jobs in, deliveries of the data plane out; the stack calls nothing below it."""
