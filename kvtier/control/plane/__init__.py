"""The plane itself: lookups, jobs, deliveries in, jobs of tiers and results out; the stack calls nothing below it."""
