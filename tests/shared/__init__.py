"""Several nodes on one shared filesystem, each of which is run here from packages."""
