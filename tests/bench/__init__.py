"""Benchmarks: what they promise is held against what is stored, without a limit on time."""
