"""Layer 1: one thin function per system call; knows nothing about trash."""
