"""The packages of Debian: `make packages` alone runs these, which need them built."""
