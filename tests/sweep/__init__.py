"""What a selection chooses, and what becomes of it."""
