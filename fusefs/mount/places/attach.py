"""Mounts, remounts and unmounts trashd's FUSE mounts: as root with mount(2), as a user through fusermount3.

libfuse gets the fd as its mount point (`/dev/fd/N`), since its own mount function supports only ASCII paths.

`mount -o remount,…` changes only kernel flags, which the daemon need not know. If a directory is mounted over itself,
its backing tree below /run/trashd gets the same restrictions as the mount. Otherwise actions that the mount refuses
would be possible there. The mount is restricted first, then the tree.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from fusefs.core.errors import Busy, KernelRefused, NotFound, NotPermitted, Refused
from fusefs.core.mount_options import MountOptions, flags_after
from fusefs.core.printable_names import printable
from fusefs.linux import fuse_device, mount_calls
from fusefs.linux.fd import Fd, close_on_error
from fusefs.linux.fuse_device import kill_late, open_servers
from fusefs.linux.mountinfo import TRASHD_FSTYPE, Mount, covering_mount_id, is_inside, read_mounts
from fusefs.linux.runtime_directories import MOUNTS_RUNTIME
from fusefs.linux.syscalls import statx
from fusefs.mount.places import runtime_dir
from fusefs.mount.places.mount_points import real_path, top_mount

_FLAGS = {
    "ro": mount_calls.MS_RDONLY, "nosuid": mount_calls.MS_NOSUID, "nodev": mount_calls.MS_NODEV,
    "noexec": mount_calls.MS_NOEXEC, "sync": mount_calls.MS_SYNCHRONOUS, "dirsync": mount_calls.MS_DIRSYNC,
    "nosymfollow": mount_calls.MS_NOSYMFOLLOW,
}  # fmt: skip
INHERITED = {
    "ro": os.ST_RDONLY, "nosuid": os.ST_NOSUID, "nodev": os.ST_NODEV, "noexec": os.ST_NOEXEC, "nosymfollow": 0x2000,
}  # fmt: skip
"""Flags that a mount inherits from the mount of SRC, as statvfs bits."""
_SUBTYPE = TRASHD_FSTYPE.partition(b".")[2]
_NO_FUSE = "load the kernel module with modprobe fuse, or start the container with --device /dev/fuse"
_NO_FUSERMOUNT = "install it (Debian package: fuse3), or mount as root"
_DAEMON_TIMEOUT_S, _POLL_S = 5.0, 0.02
"""How long a daemon may take to reply to earlier requests and exit after its mount was unmounted, and how long it may
take to close a file after the last writer has closed it."""
_BRIEF_USE_S = 1.0
"""How long an unmount waits for the reaper service and commands to close a mount."""
_RESTRICTIONS = (
    mount_calls.MS_RDONLY | mount_calls.MS_NOSUID | mount_calls.MS_NODEV | mount_calls.MS_NOEXEC
    | mount_calls.MS_NOSYMFOLLOW
)  # fmt: skip
_FUSECTL = Path("/sys/fs/fuse/connections")


class UnmountMode(Enum):
    """How to unmount.

    PLAIN  fail if the mount is in use
    LAZY   detach the mount; programs that use it can continue
    FORCE  abort the connection, so that every call on the mount fails, and kill the daemon if it hangs
    """

    PLAIN = "plain"
    LAZY = "lazy"
    FORCE = "force"


class Attached(NamedTuple):
    """A mount, and the fd of /dev/fuse that serves it.

    mount          the mount, with the mount point at which it is or will be attached
    unattached_fd  keeps the mount alive until it is attached; None: it is attached
    """

    fd: Fd
    mount: Mount
    unattached_fd: Fd | None


class Unmounted(NamedTuple):
    """What happened to the daemon when its mount was unmounted.

    is_ended   the daemon has certainly ended, so the underlying filesystem can be unmounted, too
    is_killed  the daemon hung and was killed
    """

    is_ended: bool
    is_killed: bool


def inherited_flags(dir_fd: int) -> frozenset[str]:
    """Return the flags that a mount of this tree must inherit from the tree's own mount, such as nosuid and nodev."""
    on = os.fstatvfs(dir_fd).f_flag
    return frozenset(name for name, flag in INHERITED.items() if on & flag)


def attach_later(source: bytes, target: bytes, options: MountOptions, flags: Iterable[str]) -> Attached:
    """Mount as root, but leave the mount unattached until it is moved to its mount point (mount/life/root_inode.py).

    Raises  OSError, also if the kernel does not support this, or rejects `source` because the path is too long
    """
    mount_calls.check_move_mount()
    with close_on_error(_open_fuse()) as fd:
        texts = {name.encode(): value.encode() for name, value in _fuse_options(fd, options).items()}
        texts[b"subtype"] = _SUBTYPE
        with close_on_error(mount_calls.new_mount(b"fuse", source, texts, flag_bits(flags))) as unattached_fd:
            device = statx(unattached_fd).dev
    device_text = b"%d:%d" % (os.major(device), os.minor(device))
    return Attached(fd, Mount(0, 0, device_text, b"/", target, TRASHD_FSTYPE, source, b""), unattached_fd)


def attach(source: bytes, target: bytes, options: MountOptions, flags: Iterable[str]) -> Attached:
    """Mount. From then on, requests wait until a daemon serves them.

    source  the backing path, as mountinfo will show it
    flags   the flags to set, by the names that mount(8) uses
    Raises  Refused, NotPermitted: a requirement is missing
    """
    fd = (
        _mount_as_root(source, target, options, flags)
        if os.geteuid() == 0
        else _mount_as_user(source, target, options, flags)
    )
    mount = top_mount(target, read_mounts())
    if mount is None or not mount.is_trashd():
        fd.close()
        raise Refused(f"{printable(target)}: the mount point was moved in the meantime")
    return Attached(fd, mount, None)


def _open_fuse() -> Fd:
    try:
        return mount_calls.open_fuse()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENODEV, errno.ENXIO):
            raise
        raise Refused("/dev/fuse: can't be opened", _NO_FUSE) from error


def flag_bits(flags: Iterable[str]) -> int:
    """Return flags as bits for mount(2). flags: the names that mount(8) uses"""
    return sum({_FLAGS[name] for name in flags})


def _fuse_options(fd: Fd, options: MountOptions) -> dict[str, str]:
    """Return the mount options for the kernel's FUSE driver. The value of an option without a value is empty."""
    values = {"fd": f"{int(fd)}", "user_id": f"{os.geteuid()}", "group_id": f"{os.getegid()}"}
    return {**values, "rootmode": f"{stat.S_IFDIR:o}", **dict.fromkeys(_boolean_options(options), "")}


def _mount_as_root(source: bytes, target: bytes, options: MountOptions, flags: Iterable[str]) -> Fd:
    with close_on_error(_open_fuse()) as fd:
        try:
            with _open(target) as target_fd:
                data = ",".join(
                    f"{name}={value}" if value else name for name, value in _fuse_options(fd, options).items()
                )
                # MS_POSIXACL makes the kernel leave the umask to the daemon. libfuse by itself does not request that.
                bits = flag_bits(flags) | mount_calls.MS_POSIXACL
                mount_calls.mount(source, target_fd, TRASHD_FSTYPE, bits, data.encode())
        except PermissionError as error:
            raise NotPermitted(target, "mounting needs CAP_SYS_ADMIN, which this container does not grant") from error
    return fd


def _mount_as_user(source: bytes, target: bytes, options: MountOptions, flags: Iterable[str]) -> Fd:
    if not os.path.exists("/dev/fuse"):
        raise Refused("/dev/fuse: does not exist", _NO_FUSE)
    texts = [word.encode() for word in (*sorted(flags), *_boolean_options(options))]
    named = (b"fsname=" + fuse_device.escape_option(source), b"subtype=" + _SUBTYPE)
    try:
        return fuse_device.mount(target, b",".join([*texts, *named]))
    except FileNotFoundError as error:
        raise Refused("fusermount3: not installed, but needed to mount without root", _NO_FUSERMOUNT) from error
    except fuse_device.FusermountFailed as error:
        raise NotPermitted(str(error), _hint(str(error))) from error


def _hint(message: str) -> str:
    """Return a hint for a fusermount3 error message. Source  the fusermount3 of libfuse 3"""
    if "user_allow_other" in message:
        return "omit -o allow_other, or have root add the line user_allow_other to /etc/fuse.conf"
    if "/dev/fuse" in message:
        return "as root, run chmod 666 /dev/fuse (udev's default), or start the container with --device /dev/fuse"
    return "the mount point must be a directory that you own"


def _boolean_options(options: MountOptions) -> list[str]:
    return [name for name in ("allow_other", "default_permissions") if getattr(options, name)]


def unmount(path: bytes, mode: UnmountMode) -> Unmounted:
    """Unmount a trashd mount.

    Raises  NotFound: there is no trashd mount; Busy; NotPermitted
    """
    target = real_path(path)
    mount = top_mount(target, read_mounts())
    if mount is None or not mount.is_trashd():
        raise NotFound(f"trashd mount at {printable(target)}", "findmnt -t fuse.trashd lists all trashd mounts")
    is_killed = False
    if mode is UnmountMode.FORCE:
        # Over io_uring, requests belong to the daemon even before it reads them. If the daemon is stopped, only its
        # death releases them, and the kernel makes the last process that leaves the mount wait for that. By keeping
        # the mount point open, this process avoids being the last one before it has killed the daemon.
        with open_servers(mount.connection(), mount.owner) as daemon, _open(mount.point):
            detach(mount, mode)
            is_killed = kill_late(daemon, _DAEMON_TIMEOUT_S)
    else:
        _detach_when_unused(mount, mode)
    if os.geteuid():
        return Unmounted(True, is_killed)
    is_lazy = mode is UnmountMode.LAZY
    return Unmounted(
        runtime_dir.remove_unless_served(target, 0 if is_lazy else _DAEMON_TIMEOUT_S) or is_lazy, is_killed
    )


def _detach_when_unused(mount: Mount, mode: UnmountMode) -> None:
    """Unmount; if the mount is busy, try again for `_BRIEF_USE_S`. Raises  as `detach`"""
    deadline_s = time.monotonic() + _BRIEF_USE_S
    while True:
        try:
            detach(mount, mode)
        except Busy:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(_POLL_S)
        else:
            return


def detach(mount: Mount, mode: UnmountMode = UnmountMode.PLAIN) -> None:
    """Unmount.

    Raises  Busy: the mount is in use (PLAIN only); NotPermitted: the mount belongs to another user
    """
    path = printable(mount.point)
    busy = Busy(
        path, f"fuser -vm {path} lists the processes; --lazy lets them continue, and --force makes their calls fail"
    )
    if os.geteuid():
        _detach_as_user(mount, mode, busy)
        return
    flags = 0 if mode is UnmountMode.PLAIN else mount_calls.MNT_DETACH
    if mode is UnmountMode.FORCE:
        flags |= mount_calls.MNT_FORCE  # aborts the connection, as fusectl does
    try:
        mount_calls.unmount(mount.point, flags)
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise busy from error
        if error.errno != errno.EINVAL:  # EINVAL: another process has unmounted it in the meantime
            raise


def _detach_as_user(mount: Mount, mode: UnmountMode, busy: Busy) -> None:
    if mode is UnmountMode.FORCE:
        _abort(mount)
    try:
        fuse_device.unmount(mount.point, lazily=mode is not UnmountMode.PLAIN)
    except FileNotFoundError as error:
        raise KernelRefused("fusermount3: not installed", _NO_FUSERMOUNT) from error
    except fuse_device.FusermountFailed as error:
        if os.strerror(errno.EBUSY) in str(error):
            raise busy from error
        raise NotPermitted(str(error), "only root and the user who mounted it can unmount it") from error


def _abort(mount: Mount) -> None:
    try:
        (_FUSECTL / str(mount.connection()) / "abort").write_text("1")
    except FileNotFoundError as error:
        hint = f"as root, run: mount -t fusectl none {_FUSECTL}"
        raise Refused(f"{printable(mount.point)}: its FUSE connection can't be aborted", hint) from error


def remount(target: bytes, texts: Sequence[str], *, is_sloppy: bool = False) -> bool:
    """Change a mount's flags according to the values of `-o`, if these contain `remount`. Returns  whether they do

    Restrictions from the mount of SRC stay in force. So do those of a user's mount, because its daemon could claim that
    files belong to root.
    Raises  UsageError; Refused: not a trashd mount; NotPermitted; Busy: a file is open for writing
    """
    if flags_after(texts, frozenset(), is_sloppy=is_sloppy) is None:
        return False
    path, mounts = printable(target), read_mounts()
    mount = top_mount(target, mounts)
    if mount is None or not mount.is_trashd():
        raise Refused(f"{path}: not a trashd mount", "findmnt -t fuse.trashd lists all trashd mounts")
    if os.geteuid():
        raise NotPermitted(target, "only root can change the flags of a mount; unmount it and mount it again")
    old_flags = mount.flags()
    new_bits = flag_bits(
        (flags_after(texts, old_flags, is_sloppy=is_sloppy) or frozenset()) | _fixed_flags(mount, mounts)
    )
    with ExitStack() as stack:
        point = stack.enter_context(_open(target))
        try:
            if _is_over_itself(mount):
                tree = stack.enter_context(_open(mount.source))
                _set_flags(point, tree, new_bits, was_read_only="ro" in old_flags)
            else:
                mount_calls.remount(point, new_bits)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            raise Busy(path, f"a process has a file open for writing; fuser -vm {path} lists the processes") from error
    return True


def _set_flags(point: Fd, tree: Fd, new_bits: int, *, was_read_only: bool) -> None:
    if not new_bits & mount_calls.MS_RDONLY:
        mount_calls.set_flags(tree, new_bits, _RESTRICTIONS)
    mount_calls.remount(point, new_bits)
    if new_bits & mount_calls.MS_RDONLY:
        try:
            _restrict_tree(tree, new_bits)
        except OSError:
            if not was_read_only:
                mount_calls.remount(point, new_bits & ~mount_calls.MS_RDONLY)
            raise


def _restrict_tree(tree: Fd, bits: int) -> None:
    deadline_s = time.monotonic() + _DAEMON_TIMEOUT_S
    while True:
        try:
            mount_calls.set_flags(tree, bits, _RESTRICTIONS)
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline_s:
                raise
            time.sleep(_POLL_S)
        else:
            return


def _fixed_flags(mount: Mount, mounts: Sequence[Mount]) -> frozenset[str]:
    """Return the restrictions that must stay in force: those of the mount of SRC (the mount underneath, if SRC is
    mounted over itself); for a user's mount, also its own."""
    holder = mount.parent_id if _is_over_itself(mount) else covering_mount_id(mount.source, mounts)
    flags = frozenset(flag for one in mounts if one.mnt_id == holder for flag in one.flags())
    return flags & INHERITED.keys() | (mount.flags() & INHERITED.keys() if mount.owner else frozenset())


def _is_over_itself(mount: Mount) -> bool:
    return is_inside(mount.source, MOUNTS_RUNTIME)


def _open(path: bytes) -> Fd:
    return Fd(os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))
