"""Layer 2: the trash store of a volume; one file per command, synchronous, crash-safe."""
