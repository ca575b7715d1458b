"""Floor 4: the FUSE mount. Its wings: docs/architecture.md."""
