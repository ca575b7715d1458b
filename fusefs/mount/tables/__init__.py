"""Layer 2 of the mount: the lock around the tables, the cache of a slow filesystem, and prefetching."""
