"""Wing 5 of the mount: a daemon's beginning and end, and what it tries, serves and tells the kernel beside."""
