"""Floor 6: waiting for an orphan to go and for its space to come back."""
