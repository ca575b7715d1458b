"""Floor 5: plans: rules carried out by sweeps, units, purge lists."""
