"""fusefs.linux against the real kernel."""
