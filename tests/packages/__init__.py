"""Packages: `make packages`, `make rpm` and `make tarball` alone run these, which need them built."""
