"""The command line (layer 7)."""
