"""The reaper service, which runs for years: volumes, fair shares for users, status, log and metrics."""
