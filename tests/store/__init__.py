"""fusefs.store on real filesystems."""
