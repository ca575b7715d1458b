"""Wing 1 of the mount: the tables and caches, and the one lock over them."""
