"""Kills, lost power and failing calls at every step."""
