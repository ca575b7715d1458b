"""The beats of a volume's nodes as files of the store: our own, which is our lock too, and the others'. Blocking.

`nodes/<host>.<boot id>`, one for each node that serves the volume, in the directory that a service has for itself
there: the store of root's service, a user's own folder of that user's. Where a filesystem has one kernel alone there is
`reaper.lock` instead. Of another user's making nothing is believed: who could write a beat could only have us look
more often, but he has no business here.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from typing import Self

from fusefs.core.errors import Untrusted
from fusefs.core.node_beats import BEAT_BYTES, NodeBeat, beat_name, decode_beat, encode_beat, is_beat_name
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import OTHERS_WRITE, Kernel
from fusefs.linux.machine_identity import boot_id
from fusefs.store.backing_and_mount import FILE_TO_LOCK, READABLE
from fusefs.store.layout import NODES, read_small, trusted_owners

_MOST_NODES = 1000
_TRIES = 3


class HeldBeat:
    """Our beat on an opened volume, locked: no other service of this machine works on it.

    Threads that write it may hang, and be left to themselves: its fds stay open for them. A number that is free again
    may be another file's, and what was meant for the beat would cut that to its size.
    """

    def __init__(self, kernel: Kernel, nodes: Fd, fd: Fd, name: bytes) -> None:
        self._kernel = kernel
        self._nodes = nodes
        self._fd = fd
        self.name = name
        self._text = bytes(BEAT_BYTES)
        self._mutex = threading.Lock()
        self._n_using = 0
        self._is_closed = False

    def __enter__(self) -> Self:
        """Own it for the block."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Close it, at the latest when the last thread that uses it is back."""
        with self._mutex:
            self._is_closed = True
        self._close_unused()

    @contextmanager
    def _using(self) -> Iterator[None]:
        with self._mutex:
            if self._is_closed:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            self._n_using += 1
        try:
            yield
        finally:
            with self._mutex:
                self._n_using -= 1
            self._close_unused()

    def _close_unused(self) -> None:
        with self._mutex:
            if self._is_closed and self._n_using == 0:
                self._n_using = -1  # once
                self._fd.close()
                self._nodes.close()

    def write(self, beat: NodeBeat) -> None:
        """Say that we live, durably. Raises  OSError"""
        self._text = encode_beat(beat)
        self.write_again()

    def write_again(self) -> None:
        """Say it once more, which is nothing but a small durable write. Raises  OSError"""
        with self._using():
            self._kernel.write(self._fd, self._text)
            self._kernel.fsync(self._fd)

    def all(self) -> dict[bytes, NodeBeat | None]:
        """All beats by their names, ours too, each read by a fresh open; None for what is not understood."""
        kernel = self._kernel
        found: dict[bytes, NodeBeat | None] = {}
        with self._using():
            for name in islice(filter(is_beat_name, kernel.list_anew(self._nodes)), _MOST_NODES):
                with suppress(FileNotFoundError):
                    found[name] = _read(kernel, self._nodes, name)
        return found

    def remove(self, name: bytes) -> None:
        """Take a beat away. Raises  OSError"""
        with self._using():
            self._kernel.unlink(self._nodes, name)


def own_name() -> bytes:
    """What our own beat is called."""
    return beat_name(os.uname().nodename, boot_id())


def hold_beat(kernel: Kernel, hold: Fd) -> HeldBeat | None:
    """Our beat in a directory of ours, made if missing; None if another service of this machine has it.

    Raises  OSError; Untrusted if others can write there
    """
    name = own_name()
    with ExitStack() as owned:
        nodes = owned.enter_context(_open_nodes(kernel, hold))
        for _ in range(_TRIES):
            is_new = False
            with suppress(FileExistsError):
                kernel.create(nodes, name).close()
                is_new = True
            fd = owned.enter_context(kernel.open_beneath(nodes, name, FILE_TO_LOCK))
            if not kernel.lock(fd):
                return None
            if is_new:
                kernel.fsync(nodes)
            if kernel.is_named(fd, nodes, name):  # else whoever took us for dead has removed it just now
                owned.pop_all()
                return HeldBeat(kernel, nodes, fd, name)
    return None


def _open_nodes(kernel: Kernel, hold: Fd) -> Fd:
    with suppress(FileExistsError):
        kernel.mkdir(hold, NODES)
    nodes = kernel.open_beneath(hold, NODES, READABLE)
    st = kernel.fstat(nodes)
    if st.st_uid not in trusted_owners(os.geteuid()) or st.st_mode & OTHERS_WRITE:
        nodes.close()
        raise Untrusted(f"{NODES.decode()}/ (owner {st.st_uid}, mode {st.st_mode & 0o7777:04o})")
    return nodes


def _read(kernel: Kernel, nodes: Fd, name: bytes) -> NodeBeat | None:
    """Raises  FileNotFoundError"""
    try:
        text = read_small(kernel, nodes, name, 2 * BEAT_BYTES, trusted_owners(os.geteuid()))
    except FileNotFoundError:
        raise
    except OSError:
        return None  # a link; or its server replaces it just now
    return None if text is None else decode_beat(text)
