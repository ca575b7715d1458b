"""Errors as a user sees them: one class per kind of error, with an exit code and a hint about the next step.

A message consists of the object (`detail`, which the code that raises the error passes) and the phrase of the class
(`problem`). If a class has no phrase, its detail is printed as it is: `OBJECT: problem`, or a lower-case clause without
a full stop.
"""

from __future__ import annotations

import errno as _errno
from typing import NamedTuple

from fusefs.core.printable_names import printable


class Exit:
    """The exit codes of trashd; plain numbers, since creating an Enum of this size would delay each swap.

    FAILED     any error that has no exit code of its own; for doctor: there are findings
    SIGNALLED  is added to the number of the signal, as in shells
    """

    DONE = 0
    FAILED = 1
    USAGE = 2
    REFUSED = 3
    NOT_PERMITTED = 4
    NOT_FOUND = 5
    NO_STORE = 6
    BAD_RECORD = 7
    BUSY = 8
    OCCUPIED = 9
    UNSETTLED = 10
    KERNEL_REFUSED = 11
    AUTHORITY_LOST = 12
    INCOMPLETE = 13
    UNWELL = 14
    SIGNALLED = 128
    INTERRUPTED = 130
    PIPE = 141
    TERMINATED = 143


EXIT_CODES = {
    Exit.DONE: "success",
    Exit.FAILED: "other error",
    Exit.USAGE: "wrong usage",
    Exit.REFUSED: "refused",
    Exit.NOT_PERMITTED: "permission denied",
    Exit.NOT_FOUND: "not found or not running",
    Exit.NO_STORE: "no usable trash store",
    Exit.BAD_RECORD: "unreadable record",
    Exit.BUSY: "in use by another process",
    Exit.OCCUPIED: "name taken",
    Exit.UNSETTLED: "unfinished; nothing was deleted",
    Exit.KERNEL_REFUSED: "kernel error (disk full, I/O)",
    Exit.AUTHORITY_LOST: "helper process was killed",
    Exit.INCOMPLETE: "some items failed",
    Exit.UNWELL: "reaper needs attention",
}
"""A short description of each code, for `trashd --help`; those in README.md and trashd(1) begin with the same word."""


class TrashdError(Exception):
    """An unexpected error occurred"""

    exit_code = Exit.FAILED
    errno = _errno.EIO
    problem = ""
    hint = ""

    def __init__(self, detail: str | bytes = "", hint: str = "", number: int = 0) -> None:
        """detail: what the error is about (bytes: a path); hint, number: replace the hint and errno of the class."""
        self.detail = printable(detail) if isinstance(detail, bytes) else detail
        self.hint = hint or type(self).hint
        self.errno = number or type(self).errno
        super().__init__(self.detail)

    def message(self) -> str:
        """Return the line that is printed, without the hint."""
        if self.detail and self.problem:
            return f"{self.detail}: {self.problem}"
        return self.detail or self.problem or (type(self).__doc__ or "").partition("\n")[0]

    def message_about(self, path: str) -> str:
        """Return the message without this path, for a report that already names it."""
        return self.message().removeprefix(f"{path}: ")


class UsageError(TrashdError):
    """The command line is wrong

    command, usage  the command and its usage line, which the command line's parser fills in
    """

    exit_code = Exit.USAGE
    errno = _errno.EINVAL
    command = ""
    usage = ""


class ConfigProblem(NamedTuple):
    """An error in a configuration file, and its fix.

    key         the path of the key, such as `volume[2].quota`; empty if the problem concerns the whole file
    is_warning  the configuration is used in spite of the problem
    """

    file: str
    key: str
    what: str
    fix: str
    is_warning: bool = False

    def __str__(self) -> str:
        text = ": ".join(filter(None, (self.file, self.key, self.what)))
        return f"{text} ({self.fix})" if self.fix else text


class BadConfig(TrashdError):
    """The configuration has errors"""

    exit_code = Exit.USAGE
    errno = _errno.EINVAL
    hint = "trashd config check lists all errors in the configuration"

    def __init__(self, detail: str | bytes = "", hint: str = "", problems: tuple[ConfigProblem, ...] = ()) -> None:
        """problems: all problems found; the first one is the detail, unless `detail` is given."""
        super().__init__(detail or (str(problems[0]) if problems else ""), hint)
        self.problems = problems


class Refused(TrashdError):
    """The request was refused"""

    exit_code = Exit.REFUSED
    errno = _errno.EPERM


class NotADirectory(Refused):
    """The path is not a directory"""

    errno = _errno.ENOTDIR
    problem = "not a directory (symbolic links are not followed)"
    hint = "name the directory itself; trashd rm takes files and symbolic links"


class IsMountPoint(Refused):
    """The path is a mount point, which can't be exchanged"""

    errno = _errno.EBUSY
    problem = "is a mount point"
    hint = "swap the directories inside it, or unmount it first"


class MountInside(Refused):
    """Something is mounted below the path; an exchange would move the mount with the directory"""

    errno = _errno.EBUSY
    problem = "contains a mount point"
    hint = "unmount everything that is mounted below it; findmnt lists the mount points"


class IsStore(Refused):
    """The path is in a trash store, or contains one"""

    problem = "is part of a trash store, or contains one"
    hint = "restore or reap its orphans by their IDs; trashd list shows them"


class NotAlike(Refused):
    """The new directory can't be given the owner, mode, ACL or another attribute of the old one"""

    problem = "the new directory can't be made like the old one"
    hint = "run the command as root, or accept the difference with --unlike"


class NotEncrypted(NotAlike):
    """The new directory can't be given the encryption policy of the old one"""

    problem = "the encryption (fscrypt) of the directory can't be preserved"
    hint = (
        "run the command as root, or as the user who unlocked the directory, on a filesystem that shows the encryption "
        "policy; --unlike never drops encryption"
    )


class NotKept(Refused):
    """--keep can't be carried out, so nothing was swapped"""

    problem = "--keep failed, and nothing was swapped"
    hint = "change the pattern of --keep; --dry-run shows which names it keeps"


class OtherFilesystem(Refused):
    """A rename can't move files to the destination"""

    errno = _errno.EXDEV
    problem = "on another filesystem, subvolume or project, where a rename can't move files"
    hint = "rsync --remove-source-files moves files to another filesystem"


class NotPermitted(TrashdError):
    """The user is not permitted to do this"""

    exit_code = Exit.NOT_PERMITTED
    errno = _errno.EACCES
    problem = "permission denied"
    hint = (
        "moving a path needs write permission on its parent directory (for a directory, also on itself) "
        "and search permission on every directory above it"
    )


class RootSquashed(NotPermitted):
    """The filesystem's server, or a security module, takes root's rights away"""

    errno = _errno.EPERM
    problem = "the server maps root to nobody (root squash), or a security module restricts root"
    hint = (
        "run init, the service and reap as root on a node that the server trusts (no_root_squash; nodemap admin=1); "
        "here, users run trashd reap or their own service (trashd service install --user); see docs/howto/clusters.md"
    )


class NotProven(NotPermitted):
    """Other users could have put the item into this user's part of the trash store"""

    errno = _errno.EPERM
    problem = "untrusted, because other users could have moved items into it"
    hint = "its owner can restore or reap the orphans in it; trashd doctor VOLUME prints the reason"


class NotFound(TrashdError):
    """The path or the orphan does not exist"""

    exit_code = Exit.NOT_FOUND
    errno = _errno.ENOENT
    problem = "not found"
    hint = "trashd list shows the orphans"


class NotRunning(NotFound):
    """The reaper service is not running"""

    problem = "no reaper service is running"
    hint = (
        "start it with systemctl [--user] start trashd-reaper (trashd service install [--user] installs it), "
        "or without systemd: trashd service run"
    )


class DaemonGone(NotFound):
    """The daemon of a mount has ended"""

    problem = "the daemon of this mount has ended; its last counters are shown"
    hint = "trashd mount --replace SRC MNT restarts the mount; trashd umount MNT removes it"


class NoStore(TrashdError):
    """There is no trash store that this user can use"""

    exit_code = Exit.NO_STORE
    errno = _errno.ENOENT
    problem = "no usable trash store"
    hint = "an administrator can create one: trashd init VOLUME"


class Untrusted(NoStore):
    """Another user owns the trash store, or can change it"""

    errno = _errno.EPERM
    problem = "untrusted trash store"
    hint = "root can replace it with a new store, which then contains the old one: trashd init --replace VOLUME"


class BrokenStore(NoStore):
    """The volume.json of the trash store is missing or damaged"""

    errno = _errno.EBADMSG
    problem = "damaged trash store"
    hint = "the store's owner can repair it without losing orphans: trashd init VOLUME"


class UnknownFormat(BrokenStore):
    """The trash store was made by another version of trashd"""

    problem = "unknown trash store format"
    hint = "use the version of trashd that made the store, or move the store aside: mv .trashd .trashd-old"


class NoBacking(NoStore):
    """The directory on the backing filesystem can't be reached"""

    problem = "the directory behind this mount is not accessible"
    hint = "at the root of the mount, you can trash a directory with: mv DIR .trashd/drop/"


class CrossesBoundary(NoStore):
    """The kernel refuses every rename of the directory"""

    errno = _errno.EXDEV
    problem = "can't be renamed within its filesystem (EXDEV)"
    hint = "the directory is in a lower layer of an overlayfs, or at an encryption or project quota boundary"


WAY_OUT = (
    "its owner can move it out of the store with mv, or into the drop directory, "
    "where it is deleted after 24 hours (man trashd-doctor)"
)
"""The remedy for any entry that can't be understood. It works because the store consists of plain directories."""
ELSEWHERE = "check the mount and the server: mount the filesystem again, or try another machine"
"""The remedy if a shared filesystem refuses valid requests, as CephFS refuses locks to an evicted client."""
SETTLE = f"trashd doctor --repair VOLUME completes or undoes what a killed command left unfinished; otherwise {WAY_OUT}"
"""The remedy for an operation that remains unfinished."""


class NoLocks(NoStore):
    """The filesystem has no locks (flock), so two commands could act on one orphan"""

    errno = _errno.ENOLCK
    problem = "the filesystem has no file locks (flock), but every command needs them"
    hint = "mount it with locks (Lustre: -o flock; NFS: without nolock, and with the lock service of the server)"


class BadRecord(TrashdError):
    """The record of an orphan can't be understood"""

    exit_code = Exit.BAD_RECORD
    errno = _errno.EBADMSG
    problem = "unreadable record, so the orphan is kept"
    hint = WAY_OUT


class Busy(TrashdError):
    """Another process holds the lock"""

    exit_code = Exit.BUSY
    errno = _errno.EAGAIN
    problem = "in use by another process"
    hint = "try again when that process has ended"


class TakenOver(Busy):
    """Another node took over the operation"""

    problem = "taken over by another node"
    hint = "this node was silent or disconnected for too long; trashd list shows the state of the orphan"


class Occupied(TrashdError):
    """Another file or directory has this name"""

    exit_code = Exit.OCCUPIED
    errno = _errno.EEXIST
    problem = "the name is taken"
    hint = "restore the orphan to another path with --to PATH"


class Unsettled(TrashdError):
    """The operation could be neither completed nor undone"""

    exit_code = Exit.UNSETTLED
    errno = _errno.ESTALE
    problem = "the operation was not completed, and nothing was deleted"
    hint = "trashd doctor VOLUME shows where everything is"


class KernelRefused(TrashdError):
    """A system call failed"""

    exit_code = Exit.KERNEL_REFUSED


class ServerAway(TrashdError):
    """The server of a network filesystem does not respond"""

    exit_code = Exit.KERNEL_REFUSED
    errno = _errno.ENOTCONN
    problem = "the filesystem's server does not respond"
    hint = (
        "nothing is lost, and the next reap continues once the server responds; "
        "if the mount itself is dead, unmount it and mount it again"
    )


class LacksCall(TrashdError):
    """A system call that every swap needs is not available"""

    exit_code = Exit.KERNEL_REFUSED
    errno = _errno.ENOSYS
    problem = "this system call is needed by every swap, but the kernel or a seccomp filter does not allow it"
    hint = "use Linux 5.6 or later; in a container, change its seccomp filter to allow the call"


class AuthorityLost(TrashdError):
    """The process that root started as the user was killed or stopped"""

    exit_code = Exit.AUTHORITY_LOST
    errno = _errno.ECHILD
    problem = "the helper process of this user was killed or stopped"
    hint = "run the command again, or let the user run it; a user can kill their own processes"


class Incomplete(TrashdError):
    """Some of the items failed"""

    exit_code = Exit.INCOMPLETE


class AcrossUsers(Incomplete):
    """Root does not move files from one user's directory into another's"""

    problem = "root does not move files across the boundary between users"
    hint = "restore it with --to into a directory that only root can write to, then move it from there"


class Unwell(TrashdError):
    """The reaper of a volume needs attention"""

    exit_code = Exit.UNWELL
    hint = "trashd status shows its last errors"


BY_NAME: dict[str, type[TrashdError]] = {
    name: kind for name, kind in list(globals().items()) if isinstance(kind, type) and issubclass(kind, TrashdError)
}
"""Every class by its name: an error that another process reports is raised here as the same class."""
_GONE = (
    "the server or daemon of this filesystem is gone: unmount the filesystem and mount it again; "
    "for a trashd mount, run trashd mount --replace SRC MNT"
)
_FREE = "trashd du shows the space that orphans take, and trashd reap --free SIZE deletes enough of them to free SIZE"
_HINTS = {
    _errno.ENOSPC: f"the volume is full: {_FREE}",
    _errno.EDQUOT: f"a quota is used up: {_FREE}",
    _errno.EROFS: "the filesystem is mounted read-only",
    _errno.EISDIR: "name a file instead of a directory",
    _errno.EIO: "the disk reported an error: check the kernel log (dmesg) first",
    _errno.EAGAIN: "the limit on processes is reached: raise ulimit -u, or TasksMax= of the unit or container",
    _errno.EMFILE: "too many open files: raise ulimit -n",
    _errno.ENOTCONN: _GONE,
    _errno.ECONNABORTED: _GONE,
    _errno.ECANCELED: _GONE,
    _errno.ENAMETOOLONG: (
        "a name can have at most 255 bytes, and a path at most 4,095: change into a directory and use a relative path"
    ),
}


_KINDS: dict[int, type[TrashdError]] = {
    _errno.EXDEV: CrossesBoundary, _errno.ENOLCK: NoLocks, _errno.ENOTDIR: NotADirectory, _errno.EACCES: NotPermitted,
    _errno.EPERM: NotPermitted,
}  # fmt: skip


def from_os(error: OSError | TrashdError, what: str | bytes) -> TrashdError:
    """Convert an OSError about the object `what` to a TrashdError with a hint; return a TrashdError unchanged."""
    if isinstance(error, TrashdError):
        return error
    number = error.errno or _errno.EIO
    text = printable(what) if isinstance(what, bytes) else what
    if number in _KINDS:
        return _KINDS[number](what)
    if number == _errno.ENOKEY:
        return NotEncrypted(f"{text} ({error.strerror})")
    if number == _errno.ENOENT:
        missing = NotFound(what)
        missing.hint = ""  # a list of orphans does not help if a path was mistyped
        return missing
    reason = error.strerror or _errno.errorcode.get(number, str(number))
    return KernelRefused(f"{text}: {reason}", _HINTS.get(number, ""), number)


class errors_about:  # noqa: N801 - used like contextlib.suppress
    """A context manager that converts an OSError into a TrashdError about the object `what`."""

    def __init__(self, what: str | bytes) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: object, _trace: object) -> None:
        if isinstance(error, OSError):
            raise from_os(error, self._what) from error
