"""Layer 4: the FUSE mount. docs/architecture.md lists its packages."""
