"""Root's registry of users' folders: which directory is which user's, by its identity. Only root can write it."""

from __future__ import annotations

import errno
import json
from contextlib import suppress
from typing import NamedTuple

from fusefs.core.identity import Identity, Likelihood, compare
from fusefs.core.names import Name
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.store.backing_and_mount import FILE_TO_LOCK, FILE_TO_READ, FULL, suppress_errno
from fusefs.store.layout import decode_identity

MOST_REFUSED = 16
"""Directories of one user that did not hold at root's first look; after so many no more of that user are."""
_MAX_BYTES = 8192
_NEW = Name(b".new")
_SPARE = Name(b".spare")
"""Blocks for one file more: on a full volume a folder must be registered before root's reap may free anything in it."""


class RegisteredFolder(NamedTuple):
    """What root noted of one user.

    name      of the user's folder below `u/`; empty if there is none
    identity  of it
    refused   what was not the user's folder when root first saw it, whatever has become of it since
    """

    uid: int
    name: Name = Name(b"")
    identity: Identity = Identity("", 0, 0)
    refused: tuple[Identity, ...] = ()

    def proves(self, found: Identity) -> bool:
        """Whether that is the folder which root registered. Handles must agree to the letter: a snapshot is another.

        Where a filesystem has no identities (FUSE) it is: only root makes names below `u/`.
        """
        if not self.name:
            return False
        if self.identity.handle and found.handle:
            return self.identity.handle == found.handle
        return compare(self.identity, found) is not Likelihood.OTHER

    def is_same(self, found: Identity) -> bool:
        """Whether it certainly is that folder, wherever it lies."""
        return self.proves(found) and compare(self.identity, found) is Likelihood.SAME

    def has_refused(self, found: Identity) -> bool:
        """Whether that is something which was refused at root's first look, or may be."""
        return any(compare(one, found) is not Likelihood.OTHER for one in self.refused)

    def is_closed(self) -> bool:
        """Whether so much of the user's was refused that root looks at nothing more."""
        return len(self.refused) >= MOST_REFUSED


def read_registered(kernel: Kernel, registry_fd: Fd | None, uid: int) -> RegisteredFolder:
    """What root noted of a user: nothing, if there is no such file, or it can't be understood. Raises  OSError"""
    nothing = RegisteredFolder(uid)
    if registry_fd is None:
        return nothing
    try:
        with kernel.open_beneath(registry_fd, _file_of(uid), FILE_TO_READ) as fd:
            fields = json.loads(kernel.read(fd, _MAX_BYTES))
    except (FileNotFoundError, ValueError, RecursionError):
        return nothing
    if not isinstance(fields, dict) or fields.get("uid") != uid:
        return nothing
    name, listed, folder = fields.get("name"), fields.get("refused"), decode_identity(fields.get("folder"))
    refused = tuple(filter(None, map(decode_identity, listed))) if isinstance(listed, list) else ()
    if not isinstance(name, str) or folder is None:
        return nothing._replace(refused=refused)
    return RegisteredFolder(uid, Name(name.encode("utf-8", "replace")), folder, refused)


def write_registered(kernel: Kernel, registry_fd: Fd, entry: RegisteredFolder) -> None:
    """Note it, durably; needs root, and LOCK held. Raises  OSError"""
    fields = {
        "uid": entry.uid,
        "name": entry.name.decode(),
        "folder": entry.identity._asdict(),
        "refused": [one._asdict() for one in entry.refused],
    }
    file = _file_of(entry.uid)
    new = Name(file + _NEW)
    text = json.dumps(fields).encode() + b"\n"
    with suppress(FileNotFoundError):
        kernel.unlink(registry_fd, new)
    try:
        with kernel.create(registry_fd, new) as fd:
            _fill(kernel, fd, text)
    except OSError as error:
        with suppress(FileNotFoundError):
            kernel.unlink(registry_fd, new)
        if error.errno not in FULL:
            raise
        new = _SPARE
        with kernel.open_beneath(registry_fd, new, FILE_TO_LOCK) as fd:
            _fill(kernel, fd, text)
    kernel.rename(registry_fd, new, registry_fd, file)
    kernel.fsync(registry_fd)


def _fill(kernel: Kernel, fd: Fd, text: bytes) -> None:
    kernel.write(fd, text)
    kernel.chmod(fd, 0o644)
    kernel.fsync(fd)


def ensure_spare(kernel: Kernel, registry_fd: Fd) -> None:
    """Keep room for one file more, if there is room; needs root, and LOCK held. Raises  OSError"""
    with suppress_errno(*FULL, errno.EOPNOTSUPP, errno.EEXIST), kernel.create(registry_fd, _SPARE) as fd:
        kernel.reserve_blocks(fd, _MAX_BYTES)


def _file_of(uid: int) -> Name:
    return Name(b"%d" % uid)
