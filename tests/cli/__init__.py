"""The command as a person or a script sees it."""
