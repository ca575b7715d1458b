"""Layer 0 of the mount: mount points, and the files that a mount keeps in its runtime directory for other commands."""
