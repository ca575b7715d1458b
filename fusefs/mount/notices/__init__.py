"""Wing 3 of the mount: what the kernel is told unasked."""
