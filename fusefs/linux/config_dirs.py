"""Where configuration and plans are; without what reads them, as `restore` only asks whether there are rules."""

from __future__ import annotations

import os
from contextlib import suppress

SYSTEM_DIR = b"/etc/trashd"
_PLANS, _ENDING = b"plan.d", b".toml"


def config_dir() -> bytes | None:
    """Where this user's configuration is: the system's for root; None for a user without a home."""
    if os.geteuid() == 0:
        return SYSTEM_DIR
    given = os.environb.get(b"XDG_CONFIG_HOME", b"")
    home = given if given.startswith(b"/") else os.path.expanduser(b"~/.config")
    return home + b"/trashd" if home.startswith(b"/") else None


def is_drop_in(name: bytes) -> bool:
    """Whether a file of that name in a directory of drop-ins is one."""
    return name.endswith(_ENDING) and not name.startswith(b".")


def plan_dir() -> bytes | None:
    """Where this user's rules are: /etc/trashd/plan.d for root; None for a user without a home."""
    above = config_dir()
    return None if above is None else os.path.join(above, _PLANS)


def are_rules_in_force() -> bool:
    """Whether root has rules, or the caller."""
    for place in {os.path.join(SYSTEM_DIR, _PLANS), plan_dir() or b""}:
        with suppress(OSError):
            if any(map(is_drop_in, os.listdir(place))):
                return True
    return False
