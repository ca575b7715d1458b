"""Slices of work, run by workers at a pace; shared by removals and sweeps."""
