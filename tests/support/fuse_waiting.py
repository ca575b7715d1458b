"""A FUSE filesystem on the seam (mount/bridge/pyfuse3_loop.py) with handlers that wait and patched replies to READDIR.

    python -m tests.support.fuse_waiting MNT [--entries N] [--keep] [--names-only] [--read-first]

Who reads an attribute of its only directory gets one of the `Counts` (`user.waiting`), or has something done:
`user.wait-…` waits for `user.go`, `user.thread-…` does so in a thread, `user.cancel` ends the service. The entries
have the names 0 to N-1. With --read-first each request is read by us, and left for pyfuse3 (pyfuse3_loop.serve_by).
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import signal
import stat
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyfuse3
import trio
from pyfuse3 import EntryAttributes, FileHandleT, FUSEError, InodeT, ModeT, ReaddirToken, RequestContext

from fusefs.core import fuse_protocol as wire
from fusefs.mount.bridge import pyfuse3_loop
from fusefs.mount.bridge.reply_patching import NAME_ONLY_GENERATION, ReplyPatching, cache_listing, omit_nodes
from tests.support.foreground_mount import until
from tests.support.fuse_watchdog import FuseMount, fuse_mount
from tests.support.trashd_command import support_program

N_WORKERS = 4
_TIMEOUT_S = 300.0
_FIRST_INO = 1000
_DEVICE = "/dev/fuse"


@dataclass(slots=True)
class Counts:
    """What a client may ask for."""

    waiting: int = 0  # handlers
    lookups: int = 0  # of entries that exist
    readdirs: int = 0
    forgotten: int = 0  # references


@dataclass(frozen=True, slots=True)
class Waiting:
    """A live mount of it."""

    path: Path
    fuse: FuseMount

    def count(self, name: str) -> int:
        """One of `Counts`, now."""
        return int(os.getxattr(self.path, f"user.{name}"))

    def ask(self, command: str) -> None:
        """Have something done, and wait until it is."""
        self.count(command)

    def waits(self, n_handlers: int) -> bool:
        """Whether so many handlers come to wait in time."""
        return until(lambda: self.count("waiting") == n_handlers)


@contextlib.contextmanager
def waiting_mount(mount_point: Path, *words: str, limit_s: float = 30) -> Iterator[Waiting]:
    """The filesystem on an empty directory. Raises  TimeoutError: it hung, see fuse_mount"""
    with fuse_mount(support_program("fuse_waiting", mount_point, *words), mount_point, limit_s) as fuse:
        yield Waiting(mount_point, fuse)


class WaitingFs(pyfuse3.Operations):
    """The handlers."""

    def __init__(self, n_entries: int, *, keeps: bool, names_only: bool) -> None:
        super().__init__()
        self.counts = Counts()
        self.scope = trio.CancelScope()
        self.replies: ReplyPatching | None = None
        self._n_entries, self._keeps, self._names_only = n_entries, keeps, names_only
        self._go, self._thread_go = trio.Event(), threading.Event()

    def replied(self) -> None:
        if self.replies is not None:
            self.replies.replied()

    def serve(self) -> bool | None:
        """See --read-first."""
        assert self.replies is not None
        request = read_request(self.replies.device)
        if not request:
            return None if request is None else False
        self.replies.hand_over(request)
        return False

    async def lookup(self, parent_inode: InodeT, name: bytes, ctx: RequestContext) -> EntryAttributes:
        if name.isdigit() and int(name) < self._n_entries:
            self.counts.lookups += 1
            return _entry(int(name))
        raise FUSEError(errno.ENOENT)

    async def forget(self, inode_list: Sequence[tuple[InodeT, int]]) -> None:
        self.counts.forgotten += sum(n for inode, n in inode_list if inode != pyfuse3.ROOT_INODE)

    async def getattr(self, inode: InodeT, ctx: RequestContext) -> EntryAttributes:
        return _directory() if inode == pyfuse3.ROOT_INODE else _entry(inode - _FIRST_INO)

    async def getxattr(self, inode: InodeT, name: bytes, ctx: RequestContext) -> bytes:
        command = name.decode().removeprefix("user.")
        match kind := command.partition("-")[0]:
            case "wait" | "thread":
                self.counts.waiting += 1
                await (self._go.wait() if kind == "wait" else trio.to_thread.run_sync(self._thread_go.wait))
                self.counts.waiting -= 1
            case "go":
                self._go.set()
                self._thread_go.set()
            case "cancel":
                self.scope.cancel()
        return b"%d" % getattr(self.counts, command, 0)

    async def opendir(self, inode: InodeT, ctx: RequestContext) -> FileHandleT:
        if self._keeps:
            assert self.replies is not None
            self.replies.patch_next(partial(cache_listing, wire.FOPEN_KEEP_CACHE | wire.FOPEN_CACHE_DIR))
        return FileHandleT(0)

    async def readdir(self, fh: FileHandleT, start_id: int, token: ReaddirToken) -> None:
        self.counts.readdirs += 1
        for number in range(start_id, self._n_entries):
            entry = _entry(number)
            if self._names_only:
                entry.generation = NAME_ONLY_GENERATION
            if not pyfuse3.readdir_reply(token, b"%d" % number, entry, number + 1):
                break
        if self._names_only:
            assert self.replies is not None
            self.replies.patch_next(omit_nodes)


def _directory() -> EntryAttributes:
    entry = EntryAttributes()
    entry.st_ino = InodeT(pyfuse3.ROOT_INODE)
    entry.st_mode = ModeT(stat.S_IFDIR | 0o755)
    return entry


def _entry(number: int) -> EntryAttributes:
    entry = EntryAttributes()
    entry.st_ino = InodeT(_FIRST_INO + number)
    entry.st_mode = ModeT(stat.S_IFREG | 0o644)
    entry.st_size = number
    entry.entry_timeout = entry.attr_timeout = _TIMEOUT_S
    return entry


async def _serve(fs: WaitingFs, *, reads_first: bool) -> None:
    with fs.scope:
        if reads_first:
            pyfuse3_loop.serve_by(fs.serve)
        await pyfuse3.main(min_tasks=N_WORKERS, max_tasks=N_WORKERS)


def read_request(device: int) -> bytes | None:
    """One that the kernel has for this process; empty if the connection is gone, None if there is none."""
    os.set_blocking(device, False)
    try:
        return os.read(device, wire.REQUEST_BYTES_MAX)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def session_fd() -> int:
    """Where pyfuse3 of this process reads requests."""
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.fspath(entry.readlink()) == _DEVICE:
                return int(entry.name)
    raise FileNotFoundError(_DEVICE)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mount_point")
    parser.add_argument("--entries", type=int, default=0)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--names-only", action="store_true")
    parser.add_argument("--read-first", action="store_true")
    asked = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever is started with `&` has it ignored
    fs = WaitingFs(asked.entries, keeps=asked.keep, names_only=asked.names_only)
    assert pyfuse3_loop.hook(fs.replied, lambda: None)
    pyfuse3.init(fs, asked.mount_point, {"fsname=waiting"})
    fs.replies = ReplyPatching(session_fd())
    try:
        trio.run(partial(_serve, fs, reads_first=asked.read_first))
    finally:
        fs.replies.close()  # or the connection stays open, and unmounting waits for it
        pyfuse3.close()


if __name__ == "__main__":
    main()
