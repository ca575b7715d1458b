"""Layer 2 of the mount: the lock around the tables, the cache for a slow filesystem, and prefetching."""
