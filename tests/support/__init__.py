"""Builders, probes and fault injection that the groups share."""
