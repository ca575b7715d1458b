"""fusefs.engine on real trees."""
