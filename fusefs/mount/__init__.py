"""Layer 4: the FUSE mount. docs/internals/architecture.md lists its packages."""
