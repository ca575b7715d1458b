"""Run slices of work in workers, at a controlled pace; used by removals and sweeps."""
