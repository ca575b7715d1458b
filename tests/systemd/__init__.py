"""Tests of the units, and of what runs by them under a real systemd."""
