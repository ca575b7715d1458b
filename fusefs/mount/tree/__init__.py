"""Layer 3 of the mount: operations on the backing filesystem, and how long the kernel may cache their results."""
