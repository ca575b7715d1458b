"""fusefs.core and the house itself: no file is touched."""
