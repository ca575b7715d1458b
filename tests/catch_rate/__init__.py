"""Faults that were mended, re-created one by one, and which test fails then. By hand: make catch-rate."""
