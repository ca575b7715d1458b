"""How the fds that a process may have are shared: by what clients have open, directories, and the daemon itself."""

from __future__ import annotations

_SPARE_FDS, _SPARE_FDS_MAX = 64, 2048
"""For the daemon's own needs, and those that operations hold for a moment: many, where many wait."""
LEAST_DIRECTORIES = 16


def n_handles(max_fds: int) -> int:
    """How many handles clients of a process that may have so many fds share."""
    return n_for_clients(max_fds) - LEAST_DIRECTORIES


def n_spare(max_fds: int) -> int:
    """How many fds of a process that may have so many are the daemon's own."""
    return max(_SPARE_FDS, min(max_fds // 4, _SPARE_FDS_MAX))


def n_for_clients(max_fds: int) -> int:
    """How many it can have open for clients."""
    return max(max_fds - n_spare(max_fds), 2 * LEAST_DIRECTORIES)
