"""Layer 2: the trash store of a volume; one file per verb, synchronous, crash-safe."""
