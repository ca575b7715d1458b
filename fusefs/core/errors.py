"""Errors as a user sees them: one class a kind, with an exit code and a hint for the next step.

The docstring's first line is the message; `detail` says what it was about.
"""

from __future__ import annotations

import errno as _errno
from typing import NamedTuple

from fusefs.core.printable_names import printable


class Exit:
    """How a command ended, for the shell; plain numbers, since to make an Enum of so many delays each swap.

    FAILED     what no other says; doctor: it found something
    SIGNALLED  and the signal's number, as shells tell it
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
    Exit.DONE: "done",
    Exit.FAILED: "something went wrong",
    Exit.USAGE: "wrong command line",
    Exit.REFUSED: "refused",
    Exit.NOT_PERMITTED: "not permitted",
    Exit.NOT_FOUND: "not found, not running",
    Exit.NO_STORE: "no store can be used",
    Exit.BAD_RECORD: "a record can't be understood",
    Exit.BUSY: "somebody else is working on it",
    Exit.OCCUPIED: "something else has the name now",
    Exit.UNSETTLED: "not finished; everything was kept",
    Exit.KERNEL_REFUSED: "the kernel refused (full, I/O error…)",
    Exit.AUTHORITY_LOST: "the user's process was stopped",
    Exit.INCOMPLETE: "some of many items failed",
    Exit.UNWELL: "a volume's reaper needs help",
}
"""What each code says in a few words, for `trashd --help`; README.md and trashd(1) begin alike, and say more."""


class TrashdError(Exception):
    """Something went wrong"""

    exit_code = Exit.FAILED
    errno = _errno.EIO
    hint = ""

    def __init__(self, detail: str | bytes = "", hint: str = "", number: int = 0) -> None:
        """detail: what it was about (bytes are a path); hint, number: instead of the class's next step and errno."""
        self.detail = printable(detail) if isinstance(detail, bytes) else detail
        self.hint = hint or type(self).hint
        self.errno = number or type(self).errno
        super().__init__(self.detail)

    def message(self) -> str:
        """The sentence for a person, without the hint."""
        text = (type(self).__doc__ or "").partition("\n")[0]
        return f"{text}: {self.detail}" if self.detail else text


class UsageError(TrashdError):
    """The command line doesn't make sense"""

    exit_code = Exit.USAGE
    errno = _errno.EINVAL
    hint = "see --help"


class ConfigProblem(NamedTuple):
    """What is wrong in a configuration, and what to write instead.

    key         the path of the key, such as `volume[2].quota`; empty if it is the file as a whole
    is_warning  the configuration is in force all the same
    """

    file: str
    key: str
    what: str
    fix: str
    is_warning: bool = False

    def __str__(self) -> str:
        """For a person, on one line."""
        text = ": ".join(filter(None, (self.file, self.key, self.what)))
        return f"{text} ({self.fix})" if self.fix else text


class BadConfig(TrashdError):
    """The configuration has problems"""

    exit_code = Exit.USAGE
    errno = _errno.EINVAL
    hint = "trashd config check shows all of them"

    def __init__(self, detail: str | bytes = "", hint: str = "", problems: tuple[ConfigProblem, ...] = ()) -> None:
        """problems: every one that was found; the detail is the first unless told."""
        super().__init__(detail or (str(problems[0]) if problems else ""), hint)
        self.problems = problems


class Refused(TrashdError):
    """Refused"""

    exit_code = Exit.REFUSED
    errno = _errno.EPERM


class NotADirectory(Refused):
    """Not a directory (a symbolic link is not followed)"""

    errno = _errno.ENOTDIR
    hint = "name the directory itself; `trashd rm` takes files and links"


class IsMountPoint(Refused):
    """A mount point can't be exchanged"""

    errno = _errno.EBUSY
    hint = "swap the directories inside it, or unmount it first"


class MountInside(Refused):
    """Something is mounted inside; the exchange would carry the mount away"""

    errno = _errno.EBUSY
    hint = "unmount it first; where a process is named, in its namespace: nsenter -t PID -m umount PATH"


class IsStore(Refused):
    """That is, or holds, a trash store"""

    hint = "reap or restore its orphans by their ids instead (trashd list)"


class NotAlike(Refused):
    """The fresh directory can't be made like the old one"""

    hint = "run it as root, or accept the difference with --unlike"


class NotEncrypted(NotAlike):
    """Encryption (fscrypt) prevents it"""

    hint = (
        "run it as root, or as the user who unlocked the directory, where its policy can be read; "
        "--unlike never drops encryption"
    )


class NotKept(Refused):
    """Can't be kept in view, so nothing was swapped"""

    hint = "--keep leaves it out, or takes another pattern; --dry-run tells what would be kept"


class OtherFilesystem(Refused):
    """A rename doesn't reach it from there: another filesystem, subvolume or project"""

    errno = _errno.EXDEV
    hint = "rsync --remove-source-files moves files to another filesystem"


class NotPermitted(TrashdError):
    """Not permitted"""

    exit_code = Exit.NOT_PERMITTED
    errno = _errno.EACCES
    hint = "to move it takes write permission on its parent, and on itself if it is a directory; to look, on the way"


class RootSquashed(NotPermitted):
    """Root is nobody to this filesystem's server (root squash), or a security module refuses root"""

    errno = _errno.EPERM
    hint = (
        "root's init, service and reaping work on a node that the server trusts (no_root_squash; nodemap admin=1); "
        "here each user has his own: trashd service install --user, or trashd reap (docs/hpc.md)"
    )


class NotProven(NotPermitted):
    """Nobody can tell that only its owner put it into the trash store"""

    errno = _errno.EPERM
    hint = "its owner can reap it, or restore it; trashd doctor VOLUME says why it is in doubt"


class NotFound(TrashdError):
    """Not found"""

    exit_code = Exit.NOT_FOUND
    errno = _errno.ENOENT
    hint = "trashd list shows what there is"


class NotRunning(NotFound):
    """No reaper service runs"""

    hint = (
        "systemctl [--user] start trashd-reaper (trashd service install [--user] puts it there), or by hand: "
        "trashd service run"
    )


class DaemonGone(NotFound):
    """The daemon of a mount is gone; its last numbers are shown"""

    hint = "bring it back by the same command with --replace, or take it away: trashd umount MNT"


class NoStore(TrashdError):
    """No trash store can be used"""

    exit_code = Exit.NO_STORE
    errno = _errno.ENOENT
    hint = "an administrator makes one with: trashd init VOLUME"


class Untrusted(NoStore):
    """The trash store there belongs to somebody else"""

    errno = _errno.EPERM
    hint = "root sets it aside in a new one with: trashd init --replace VOLUME"


class BrokenStore(NoStore):
    """The trash store there is broken"""

    errno = _errno.EBADMSG
    hint = "trashd init VOLUME, by whoever owns it, writes volume.json anew; what is in the store stays"


class UnknownFormat(BrokenStore):
    """This version of trashd does not know the format of the trash store there"""

    hint = "use the version of trashd that made the store, or move the store aside: mv .trashd .trashd-old"


class NoBacking(NoStore):
    """The directory behind this mount can't be used from here"""

    hint = "mv DIR .trashd/drop/ at the mount's root needs nothing but the mount"


class CrossesBoundary(NoStore):
    """The kernel refuses to move this between any two directories of its filesystem"""

    errno = _errno.EXDEV
    hint = "a lower layer of overlayfs, or an encryption or quota boundary at DIR itself"


WAY_OUT = (
    "its owner can move it out of the store with mv, or into the drop directory to have it deleted after a day "
    "(man trashd-doctor)"
)
"""What helps with anything that can't be understood: the store is plain directories."""
ELSEWHERE = "this machine's mount may be broken, or the server: mount it anew, or try it on another machine"
"""What helps where a shared filesystem refuses what is in order, as CephFS a lock after its client was given up."""
SETTLE = f"trashd doctor --repair VOLUME completes or undoes what a killed command left; what it can't: {WAY_OUT}"
"""What helps with anything that stays half done."""


class NoLocks(NoStore):
    """This filesystem keeps no locks (flock), without which two commands could take the same thing"""

    errno = _errno.ENOLCK
    hint = "mount it with them (Lustre: -o flock; NFS: without nolock, and with its lock service)"


class BadRecord(TrashdError):
    """A record can't be understood, so its container is kept as it is"""

    exit_code = Exit.BAD_RECORD
    errno = _errno.EBADMSG
    hint = WAY_OUT


class Busy(TrashdError):
    """Somebody else is working on it"""

    exit_code = Exit.BUSY
    errno = _errno.EAGAIN
    hint = "try again when that command has ended"


class TakenOver(Busy):
    """Another node took it for dead and goes on with it"""

    hint = "trashd list shows what became of it; this node was silent, or cut off, for too long"


class Occupied(TrashdError):
    """Something else has the name now"""

    exit_code = Exit.OCCUPIED
    errno = _errno.EEXIST
    hint = "restore it elsewhere with --to PATH"


class Unsettled(TrashdError):
    """What happened is not what was meant; everything was kept"""

    exit_code = Exit.UNSETTLED
    errno = _errno.ESTALE
    hint = "trashd doctor VOLUME says where everything is; nothing was deleted"


class KernelRefused(TrashdError):
    """The kernel refused"""

    exit_code = Exit.KERNEL_REFUSED


class ServerAway(TrashdError):
    """The filesystem's server does not answer"""

    exit_code = Exit.KERNEL_REFUSED
    errno = _errno.ENOTCONN
    hint = (
        "nothing is lost: the next reap goes on where this one ended, once the server answers; "
        "if it is the mount that is dead: unmount it, and mount it again"
    )


class LacksCall(TrashdError):
    """The kernel, or a filter of this container, refuses a system call that every swap needs"""

    exit_code = Exit.KERNEL_REFUSED
    errno = _errno.ENOSYS
    hint = "it takes Linux 5.6; in a container, one whose seccomp filter allows the call"


class AuthorityLost(TrashdError):
    """The process that acts for the user ended or was stopped"""

    exit_code = Exit.AUTHORITY_LOST
    errno = _errno.ECHILD
    hint = "its owner can stop it; run the command again, or let the user do it"


class Incomplete(TrashdError):
    """Some items failed"""

    exit_code = Exit.INCOMPLETE


class AcrossUsers(Incomplete):
    """Root carries nothing across the boundary between users"""

    hint = "restore it --to a directory of root's that nobody else can write in, and move it on from there"


class Unwell(TrashdError):
    """A volume's reaper needs somebody's help"""

    exit_code = Exit.UNWELL
    hint = "trashd status shows its last errors"


BY_NAME: dict[str, type[TrashdError]] = {
    name: kind for name, kind in list(globals().items()) if isinstance(kind, type) and issubclass(kind, TrashdError)
}
"""Every class by its name: an error that crosses from a process with another uid comes back as itself."""
_GONE = (
    "its server or daemon is gone, for now or for good: a dead mount is unmounted and mounted again; "
    "trashd mount --replace SRC MNT does that for one of trashd"
)
_FREE = "trashd reap frees what has expired, trashd reap --now ID one that trashd list shows"
_HINTS = {
    _errno.ENOSPC: f"the volume is full: {_FREE} (a reap needs no space itself)",
    _errno.EDQUOT: f"a quota is used up: {_FREE}",
    _errno.EROFS: "the filesystem is mounted read-only",
    _errno.EISDIR: "name a file instead of a directory",
    _errno.EIO: "the disk reported an error: look at the kernel's log (dmesg) before anything else",
    _errno.EAGAIN: "a limit on processes is reached: raise ulimit -u, or TasksMax= of the unit or container",
    _errno.EMFILE: "too many open files: raise ulimit -n",
    _errno.ENOTCONN: _GONE,
    _errno.ECONNABORTED: _GONE,
    _errno.ECANCELED: _GONE,
    _errno.ENAMETOOLONG: "a name has 255 bytes at most, a path 4,095; a relative one is shorter",
}


_KINDS: dict[int, type[TrashdError]] = {
    _errno.EXDEV: CrossesBoundary, _errno.ENOLCK: NoLocks, _errno.ENOTDIR: NotADirectory, _errno.EACCES: NotPermitted,
    _errno.EPERM: NotPermitted,
}  # fmt: skip


def from_os(error: OSError | TrashdError, what: str | bytes) -> TrashdError:
    """The error class and hint for what the kernel said about `what`; an error of ours as it is."""
    if isinstance(error, TrashdError):
        return error
    number = error.errno or _errno.EIO
    text = printable(what) if isinstance(what, bytes) else what
    if number in _KINDS:
        return _KINDS[number](what)
    if number == _errno.ENOKEY:
        return NotEncrypted(f"{text}: {error.strerror}")
    if number == _errno.ENOENT:
        return NotFound(what, "nothing has that name; trashd list shows what can be restored")
    reason = error.strerror or _errno.errorcode.get(number, str(number))
    return KernelRefused(f"{text}: {reason}", _HINTS.get(number, ""), number)


class errors_about:  # noqa: N801 - it is read as contextlib.suppress is
    """A block; what the kernel refuses in it is raised as an error of ours about `what`."""

    def __init__(self, what: str | bytes) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: object, _trace: object) -> None:
        if isinstance(error, OSError):
            raise from_os(error, self._what) from error
