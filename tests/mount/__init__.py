"""The mount: no program can tell it from the filesystem below."""
