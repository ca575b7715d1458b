"""Floor 3: deletes what the store holds, with the authority of the user who asked."""
