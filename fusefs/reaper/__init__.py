"""The reaper: deletes orphans, with the rights of the requesting user."""
