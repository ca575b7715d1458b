"""/run/trashd/<mount>/: which mount points root's daemons have for themselves, before their mounts stand and after."""

from __future__ import annotations

import hashlib
import os
import re
from contextlib import suppress

from fusefs.linux.file_locks import flock_holders
from fusefs.linux.runtime_directories import HOME

_SLUG_MAX_BYTES = 60
_NAMESPACES = ("/proc/self/ns/mnt", "/proc/1/ns/mnt")
"""Ours, and the machine's: systemd gives a service its own, a slave of that."""


def directory_of(target: bytes) -> bytes:
    """The directory of a mount point of this mount namespace: the same at each mount, another for any other."""
    return HOME + b"/" + name_of(target)


def name_of(target: bytes, namespace: str = _NAMESPACES[0]) -> bytes:
    """A name for a mount point.

    With the namespace in its name: /run may be shared with others, and removing a directory that is a mount point in
    another namespace takes that mount away.
    """
    number = os.stat(namespace).st_ino
    digest = hashlib.sha256(b"%d:%s" % (number, target)).hexdigest()[:16]
    slug = re.sub(rb"[^A-Za-z0-9._-]", b"_", os.path.basename(target))[:_SLUG_MAX_BYTES]
    return slug + b"-" + digest.encode()


def is_claimed(target: bytes) -> bool:
    """Whether a daemon of root's has a mount point for itself: it serves there, or is about to. Its lock is let be."""
    for namespace in _NAMESPACES:
        with suppress(OSError):  # there is no claim, or we may not look
            if flock_holders(os.stat(HOME + b"/" + name_of(target, namespace))):
                return True
    return False
