"""Floor 3: the FUSE mount. pyfuse3 is known to adapter, translate, loop and daemon alone."""
