"""Layer 6 of the mount: start and end of the daemon, the INIT request, and what it serves beside FUSE requests."""
