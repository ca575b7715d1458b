"""Layer 5 of the mount: plain mode, pyfuse3's handlers on trio. No other package imports pyfuse3."""
