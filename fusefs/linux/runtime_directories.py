"""The directories of a service and of mounts, root's or a user's own: runtime files, and state that outlives a boot."""

from __future__ import annotations

import errno
import os
from contextlib import suppress

HOME = b"/run/trashd"
"""Of root's: the directory of the directories of its mounts and its service."""
SYSTEM_RUNTIME = HOME + b"/reaper"
_SYSTEM_STATE = b"/var/lib/trashd"
_STATE_HOME, _OURS = b".local/state", b"trashd"
STATE_BELOW_HOME = _STATE_HOME + b"/" + _OURS
"""Where a user's state is without $XDG_STATE_HOME."""


def runtime_dir() -> bytes:
    """The directory of this user's running service: its status, its lock; gone after a reboot. systemd's, if that
    gave one.

    A user without $XDG_RUNTIME_DIR (cron, su) has it where a login would have made it, or else below the user's state.
    """
    told = _told(b"RUNTIME_DIRECTORY")
    if told is not None:
        return told
    if os.geteuid() == 0:
        return SYSTEM_RUNTIME
    given = os.environb.get(b"XDG_RUNTIME_DIR", b"")
    usual = b"/run/user/%d" % os.geteuid()
    if given.startswith(b"/"):
        return given + b"/trashd"
    return usual + b"/trashd" if os.path.isdir(usual) else state_dir() + b"/run"


def state_dir() -> bytes:
    """The directory of what this user's service remembers from one run to the next; systemd's, if that gave one.

    Raises  FileNotFoundError for a user without a home
    """
    told = _told(b"STATE_DIRECTORY")
    return lasting_dir() if told is None else told


def lasting_dir() -> bytes:
    """The directory of what this user's commands and service remember together: at one place, whatever systemd gives.

    Raises  FileNotFoundError for a user without a home
    """
    if os.geteuid() == 0:
        return _SYSTEM_STATE
    given = os.environb.get(b"XDG_STATE_HOME", b"")
    home = given if given.startswith(b"/") else os.path.expanduser(b"~/" + _STATE_HOME)
    if not home.startswith(b"/"):
        raise FileNotFoundError(errno.ENOENT, "no home directory, and no $XDG_STATE_HOME")
    return home + b"/" + _OURS


def _told(variable: bytes) -> bytes | None:
    """What systemd says. Source  systemd.exec(5): several are separated by colons"""
    first = os.environb.get(variable, b"").partition(b":")[0]
    return first if first.startswith(b"/") else None


def make_dir(path: bytes) -> bytes:
    """Make one of these, and what is missing above it; the same path.

    Every user may look into root's: status is for all. /run/trashd itself is the mounts' too, and can't be listed.
    """
    parent = os.path.dirname(path)
    if not os.path.isdir(parent):
        make_dir(parent)
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
        if os.geteuid() == 0:
            os.chmod(path, 0o711 if path == os.path.dirname(SYSTEM_RUNTIME) else 0o755)
    return path
