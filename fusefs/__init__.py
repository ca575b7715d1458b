"""trashd: a directory of any size is empty at once, and the old one is deleted patiently."""
