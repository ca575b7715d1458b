"""Wing 3 of the mount: the kernel's requests, read and answered without libfuse."""
