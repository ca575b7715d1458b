"""fusefs.waiting on real trees."""
