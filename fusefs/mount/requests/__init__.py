"""Layer 4 of the mount: reads the kernel's requests without libfuse, and sends the replies."""
