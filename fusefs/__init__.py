"""trashd empties a directory of any size at once, and deletes the old content patiently in the background."""
