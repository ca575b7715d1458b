"""Layer 6 of the mount: start and end of the daemon, the INIT request, and its services other than FUSE requests."""
