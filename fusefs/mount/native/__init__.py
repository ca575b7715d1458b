"""Layer 1 of the mount: the native core, in C. It carries out FUSE requests on tables that it shares with Python."""
