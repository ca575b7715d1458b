"""Layer 1 of the mount: the native core, in C. It does all FUSE requests on tables that Python code uses, too."""
