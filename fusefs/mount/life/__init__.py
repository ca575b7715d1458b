"""Layer 6 of the mount: starting and stopping the daemon, the INIT request, and all tasks other than FUSE requests."""
