"""Suites that others wrote, run on a mount of ours."""
