"""The FUSE device, except for requests: mounting with fusermount3, notifications, backing IDs, ending a connection."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from fusefs.linux.fd import Fd
from fusefs.linux.mount_calls import new_mount

_DEVICE = "/dev/fuse"
_BACKING_OPEN, _BACKING_CLOSE = 0x4010E501, 0x4004E502
_MAP = struct.Struct("=iIQ")
_ID = struct.Struct("=I")
_NOTIFY_INVAL_INODE, _NOTIFY_INVAL_ENTRY, _NOTIFY_PRUNE = 2, 3, 9
_INVAL_INODE = struct.Struct("=IiQQqq")
"""fuse_out_header (length, code, 0: not a reply to a request) and fuse_notify_inval_inode_out (nodeid, first byte,
number of bytes; 0: all). A first byte below 0 means only the attributes."""
_INVAL_ENTRY, _EXPIRE_ONLY = struct.Struct("=IiQQII"), 1
"""fuse_out_header and fuse_notify_inval_entry_out (nodeid of the directory, length of the name that follows, flags)."""
_PRUNE = struct.Struct("=IiQIIQ")
"""fuse_out_header and fuse_notify_prune_out (number of nodeids that follow)."""


def open_backing(device: int, fd: int) -> int:
    """Register a file. Return its backing ID (above 0), to which replies on /dev/fuse may refer until it is released.

    device  /dev/fuse, after the reply to INIT
    fd      the regular file; O_PATH is enough, since only its path matters. An open through the ID uses the
            credentials that this thread has now, and the client's own flags
    Raises  OSError: EPERM without CAP_SYS_ADMIN, or if INIT has not enabled this; ELOOP: its filesystem is stacked
            more deeply than INIT has agreed; EINVAL, EISDIR: not a regular file; ENOTTY: the kernel is too old
    Source  linux/fuse.h: FUSE_DEV_IOC_BACKING_OPEN; it does no I/O and never waits for a slow filesystem
    """
    backing_id: int = fcntl.ioctl(device, _BACKING_OPEN, bytearray(_MAP.pack(fd, 0, 0)))
    return backing_id


def close_backing(device: int, backing_id: int) -> None:
    """Release a backing ID; files that were opened through it stay open.

    Raises  OSError: ENOENT: there is no such ID
    Source  linux/fuse.h: FUSE_DEV_IOC_BACKING_CLOSE; this may close a file, which may trigger writeback
    """
    fcntl.ioctl(device, _BACKING_CLOSE, _ID.pack(backing_id))


def forget_attributes(device: int, nodeid: int) -> None:
    """Make the kernel drop an inode's cached attributes, but not its cached content.

    This needs no lock that a process waiting for the daemon can hold, so a handler may call it before it replies.

    device  /dev/fuse
    Source  fs/fuse/inode.c: fuse_reverse_inval_inode, with a first byte below 0
    """
    with suppress(FileNotFoundError):  # the kernel never knew the inode, or has forgotten it
        os.write(device, _INVAL_INODE.pack(_INVAL_INODE.size, _NOTIFY_INVAL_INODE, 0, nodeid, -1, 0))


def expire_name(device: int, directory: int, name: bytes) -> None:
    """Make the kernel look up a name again at its next use; processes that use its inode are not affected.

    This waits for the directory's lock, which a process waiting for a reply may hold, so a thread that sends replies
    must never call it. Before Linux 6.2, it is the same as `forget_name`.

    device     /dev/fuse
    directory  the directory's nodeid
    Source     fs/fuse/dir.c: fuse_reverse_inval_entry
    """
    _invalidate(device, directory, name, _EXPIRE_ONLY)


def forget_name(device: int, directory: int, name: bytes) -> None:
    """Make the kernel forget a name and everything below it; a working directory there then has no path.

    device, directory, Source  as for `expire_name`; this waits for the same lock
    """
    _invalidate(device, directory, name, 0)


def _invalidate(device: int, directory: int, name: bytes, flags: int) -> None:
    size = _INVAL_ENTRY.size + len(name) + 1
    head = _INVAL_ENTRY.pack(size, _NOTIFY_INVAL_ENTRY, 0, directory, len(name), flags)
    with suppress(FileNotFoundError, NotADirectoryError):  # the kernel never knew the name, or has forgotten it
        os.write(device, head + name + b"\0")


def forget_unused(device: int, nodeids: Collection[int]) -> None:
    """Make the kernel forget inodes and all their names, except inodes that are in use.

    device  /dev/fuse
    Raises  OSError: EINVAL: the kernel is older than Linux 6.18
    Source  fs/fuse/dev.c: fuse_notify_prune
    """
    size = _PRUNE.size + 8 * len(nodeids)
    packed_nodeids = struct.pack(f"={len(nodeids)}Q", *nodeids)
    os.write(device, _PRUNE.pack(size, _NOTIFY_PRUNE, 0, len(nodeids), 0, 0) + packed_nodeids)


def open_abort(connection: int) -> Fd:
    """Open an fd for `abort`, which does nothing if the connection has been aborted or is gone by then.

    connection  the connection's number: the mount's minor device number
    Raises      OSError: EPERM without CAP_SYS_ADMIN, ENOENT if there is no such connection
    Source      Documentation/filesystems/fuse.rst; fusectl is mounted here, as /sys/fs/fuse/connections may be empty
    """
    with new_mount(b"fusectl", b"fusectl", {}, 0) as mount:
        return Fd(os.open(b"%d/abort" % connection, os.O_WRONLY | os.O_CLOEXEC, dir_fd=mount))


def abort(fd: int) -> None:
    """Make every pending and future request of a connection fail. fd: from `open_abort`"""
    os.write(fd, b"1")


@contextmanager
def open_servers(connection: int, uid: int) -> Iterator[list[Fd]]:
    """Yield pidfds of a user's processes that have a FUSE connection open; an empty list before Linux 6.16.

    Only processes that we can inspect are included.
    connection  the mount's minor device number. Call this before the unmount: afterwards, the number may soon be reused
    uid         the user who mounted it. An open fd alone doesn't prove that a process serves the mount, since fds may
                be passed around (e.g. through D-Bus)
    Source      fs/fuse/dev.c: fuse_dev_show_fdinfo
    """
    pidfds: list[Fd] = []
    try:
        for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
            with suppress(OSError):  # it has ended, or we can't inspect it
                pid_fd = Fd(os.pidfd_open(pid))  # first, so that it can't belong to a later process with the same pid
                if (
                    pid != os.getpid()
                    and os.stat(f"/proc/{pid}").st_uid == uid
                    and _has_connection_open(pid, connection)
                ):
                    pidfds.append(pid_fd)
                else:
                    pid_fd.close()
        yield pidfds
    finally:
        for pid_fd in pidfds:
            pid_fd.close()


def _has_connection_open(pid: int, connection: int) -> bool:
    connection_line = b"fuse_connection:\t%d\n" % connection
    for number in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):  # closed in the meantime
            if os.readlink(f"/proc/{pid}/fd/{number}") == _DEVICE:
                with open(f"/proc/{pid}/fdinfo/{number}", "rb") as info:
                    if connection_line in info.read():
                        return True
    return False


def kill_late(pid_fds: Iterable[int], patience_s: float) -> bool:
    """Wait for processes to end, and kill those that have not ended in time. Returns  whether any were killed"""
    deadline_s = time.monotonic() + patience_s
    late = [fd for fd in pid_fds if not _has_ended(fd, max(0.0, deadline_s - time.monotonic()))]
    for fd in late:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(fd, signal.SIGKILL)
    return bool(late)


def _has_ended(pid_fd: int, limit_s: float) -> bool:
    poll = select.poll()
    poll.register(pid_fd, select.POLLIN)
    return bool(poll.poll(limit_s * 1000))


_PROGRAM = "fusermount3"
_CHANNEL = "_FUSE_COMMFD"


class FusermountFailed(Exception):
    """fusermount3 failed; the text is its message."""


def mount(target: bytes, options: bytes) -> Fd:
    """Mount with fusermount3. Returns  the fd of /dev/fuse

    options  the argument of `-o`; see `escape_option` for values with commas
    Raises   FusermountFailed, FileNotFoundError without the program
    Source   libfuse's lib/mount.c, fuse_mount_fusermount()
    """
    our_end, their_end = socket.socketpair()
    with our_end, their_end:
        _run_fusermount([b"-o", options, b"--", target], {_CHANNEL: str(their_end.fileno())}, [their_end.fileno()])
        their_end.close()
        _byte, fds, _flags, _address = socket.recv_fds(our_end, 1, 1)
    if not fds:
        raise FusermountFailed(f"{_PROGRAM} did not mount anything")
    return Fd(fds[0])


def unmount(target: bytes, *, lazily: bool) -> None:
    """Unmount a mount of this user.

    Raises  FusermountFailed, FileNotFoundError without the program
    """
    _run_fusermount([b"-u", *([b"-z"] if lazily else []), b"--", target], {}, [])


def escape_option(value: bytes) -> bytes:
    """Escape the value of fsname or subtype for `mount`."""
    return value.replace(b"\\", b"\\\\").replace(b",", b"\\,")


def _run_fusermount(arguments: list[bytes], variables: dict[str, str], pass_fds: Sequence[int]) -> None:
    result = subprocess.run(
        [_PROGRAM, *arguments],
        env={**os.environ, **variables, "LC_ALL": "C"},
        pass_fds=pass_fds,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    if result.returncode:
        raise FusermountFailed(os.fsdecode(result.stderr).strip() or f"{_PROGRAM}: exit code {result.returncode}")
