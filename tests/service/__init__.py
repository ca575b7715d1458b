"""fusefs.service as people run it, and in parts."""
