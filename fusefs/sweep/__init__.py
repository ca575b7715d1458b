"""Floor 4: sweeps. What a selection chooses below a directory is deleted, trashed, moved, copied or told."""
