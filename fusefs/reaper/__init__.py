"""The reaper: deletes the content of orphans, with the rights of the requesting user."""
