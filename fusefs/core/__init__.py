"""Layer 0: values and decisions; no I/O, no clock."""
