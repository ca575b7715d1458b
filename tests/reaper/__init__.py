"""fusefs.reaper on real trees."""
