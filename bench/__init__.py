"""Benchmarks and the demo: each module is a script, run by python -m."""
