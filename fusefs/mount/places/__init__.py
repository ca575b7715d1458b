"""Wing 0 of the mount: where mounts are, and what each leaves beside for others to read."""
