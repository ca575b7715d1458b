"""Wing 2 of the mount: what an operation does to the backing filesystem, and what of it may be believed."""
