"""Sweeps delete, trash, move, count or print the entries below a directory that match a selection."""
