"""Floor 4: the FUSE mount. Only `pyfuse3_*` imports pyfuse3."""
