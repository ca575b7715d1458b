"""Plans (layer 5): rules that sweeps apply, units and purge lists."""
