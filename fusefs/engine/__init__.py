"""Floor 3: slices of work, handed to workers at a pace: what removals and sweeps share."""
