"""Layer 5 of the mount: plain mode, with pyfuse3 handlers that run on trio. No other package imports pyfuse3."""
