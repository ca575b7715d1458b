"""fusefs.plan on real trees."""
