"""Floor 4: deletes what the store holds, with the authority of the user who asked."""
