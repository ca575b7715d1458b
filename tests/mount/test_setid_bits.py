"""Set-user-ID and set-group-ID bits and file capabilities go as on the filesystem below; a plain directory tells how.

The writer may be any user; where we differ, more is taken away, never less (docs/explain/mount-semantics.md).
"""

import errno
import mmap
import os
import shutil
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, TypeVar

import pytest

from fusefs.linux.credentials import ThreadCredentials, call_as
from fusefs.linux.syscalls import FALLOC_FL_KEEP_SIZE, fallocate
from tests.support.foreground_mount import SHARED_LIMIT_S, Mounted, trashd_mount
from tests.support.other_users import as_user
from tests.support.real_filesystems import loop_volume
from tests.support.transports import is_plain

pytestmark = pytest.mark.needs("root", "fuse", "loop")

OWNER, GROUP = 4711, 4712
CAPABILITY = "security.capability"
NET_RAW = struct.pack("<5I", 0x0200_0001, 1 << 13, 0, 0, 0)
"""VFS_CAP_REVISION_2 and effective, then permitted and inheritable of 64 bits. Source  linux/capability.h"""
FALLOC_FL_PUNCH_HOLE = 2
BITS = stat.S_ISUID | stat.S_ISGID


class Who(NamedTuple):
    """A user who may write to all of the files."""

    uid: int
    gid: int


ROOT = Who(0, 0)
EVERYBODY = {
    "owner": Who(OWNER, GROUP), "in the group": Who(4713, GROUP), "stranger": Who(4714, 4714), "root": ROOT,
    "root without capabilities": Who(0, 0),
}  # fmt: skip

KINDS = {
    "set-user-ID": 0o4777, "set-user-ID, no program": 0o4666, "set-group-ID": 0o2777, "both": 0o6777,
    "set-group-ID, not the group's program": 0o2767, "capability": 0o777, "nothing": 0o777,
}  # fmt: skip

R = TypeVar("R")
Act = Callable[[Path, int], object]
"""Gets a file and an fd of it, which was opened before the bits were set (USES_FD), or -1."""


def write_by_mmap(path: Path, _fd: int) -> None:
    def change(fd: int) -> None:
        with mmap.mmap(fd, 0) as mapped:
            mapped[0] = 1
            mapped.flush()

    _opened(path, os.O_RDWR, change)


def copy_range(path: Path, fd: int) -> int:
    return _opened(path.with_name("source"), os.O_RDONLY, lambda source: os.copy_file_range(source, fd, 4))


BLOCKS: dict[str, Act] = {  # which plain mode has not
    "allocate": lambda _path, fd: fallocate(fd, 0, 0, 100),
    "punch_hole": lambda _path, fd: fallocate(fd, FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE, 0, 2),
}
USES_FD: dict[str, Act] = {
    "write_to_fd": lambda _path, fd: os.pwrite(fd, b"x", 1),
    "write_in_turns": lambda path, fd: os.pwrite(fd, b"x", 1) + write(path, os.O_WRONLY),
    "write_nothing": lambda _path, fd: os.pwrite(fd, b"", 1),
    "truncate_fd": lambda _path, fd: os.ftruncate(fd, 3),
    "copy_range": copy_range,
    **BLOCKS,
}
ACTS: dict[str, Act] = {
    **USES_FD,
    "write": lambda path, _fd: write(path, os.O_WRONLY),
    "append": lambda path, _fd: write(path, os.O_WRONLY | os.O_APPEND),
    "open_with_truncation": lambda path, _fd: _opened(path, os.O_WRONLY | os.O_TRUNC, lambda _: None),
    "truncate": lambda path, _fd: os.truncate(path, 3),
    "write_by_mmap": write_by_mmap,
    "read": lambda path, _fd: _opened(path, os.O_RDONLY, lambda fd: os.read(fd, 9)),
    "chown_to_nobody_else": lambda path, _fd: os.chown(path, -1, -1),
    "chown_to_same_group": lambda path, _fd: os.chown(path, -1, GROUP),
    "chmod": lambda path, _fd: os.chmod(path, 0o6755),
    "set_times": lambda path, _fd: os.utime(path),
}


def write(path: Path, flags: int) -> int:
    return _opened(path, flags, lambda fd: os.write(fd, b"x"))


def _opened(path: Path, flags: int, act: Callable[[int], R]) -> R:
    fd = os.open(path, flags)
    try:
        return act(fd)
    finally:
        os.close(fd)


class Left(NamedTuple):
    """What a file has in the end."""

    mode: str
    has_capability: bool


def left(path: Path) -> Left:
    return Left(f"{stat.S_IMODE(path.stat().st_mode):04o}", CAPABILITY in os.listxattr(path))


def done(act: Act, path: Path, fd: int) -> object:
    try:
        return act(path, fd)
    except OSError as error:
        return errno.errorcode[error.errno or 0]


def made(path: Path, kind: str) -> None:
    """A file of a kind that every user may write to, its bits set last."""
    path.write_bytes(b"content")
    os.chown(path, OWNER, GROUP)
    _set_bits(path, kind)


def _set_bits(path: Path, kind: str) -> None:
    path.chmod(KINDS[kind])
    if kind == "capability":
        os.setxattr(path, CAPABILITY, NET_RAW)


def played(top: Path, who: Who) -> dict[tuple[str, str], tuple[object, Left]]:
    """What each act of a user on each kind of file returns, and what it leaves."""
    top.mkdir(mode=0o755)
    (top / "source").write_bytes(b"source")
    acts = [act for act in ACTS if not (is_plain() and act in BLOCKS)]
    cases = [(act, kind, top / f"{act} {kind}") for act in acts for kind in KINDS]
    with ExitStack() as stack:
        fds = []
        for act, kind, path in cases:
            made(path, kind)
            fds.append(os.open(path, os.O_RDWR) if act in USES_FD else -1)
            if act in USES_FD:
                stack.callback(os.close, fds[-1])
                _set_bits(path, kind)

        def play() -> list[object]:
            return [done(ACTS[act], path, fd) for (act, _kind, path), fd in zip(cases, fds, strict=True)]

        answers = play() if who is ROOT else as_user(who.uid, play, gid=who.gid)
    return {(act, kind): (answer, left(path)) for answer, (act, kind, path) in zip(answers, cases, strict=True)}


@pytest.fixture(scope="module")
def volume() -> Iterator[Path]:
    with loop_volume("ext4", 128) as path:
        yield path


@pytest.fixture(
    scope="module",
    params=[
        ("passthrough=auto",),
        ("passthrough=off",),
        ("coherence=shared",),
        ("coherence=shared", "passthrough=off", "timeout=3600"),
    ],
    ids="+".join,
)
def mount(volume: Path, request: pytest.FixtureRequest) -> Iterator[Mounted]:
    source = volume / "+".join(request.param)
    with trashd_mount(source, options=("coherence=exclusive", *request.param), limit_s=SHARED_LIMIT_S) as mounted:
        yield mounted


STRICTER_FOR_ROOT = {"write", "append", "write_to_fd", "write_in_turns", "open_with_truncation"}
"""A write comes to us without its caller, and our own, without CAP_FSETID, takes all of them away."""
MANDATORY_LOCKING = "set-group-ID, not the group's program"


def may_be_stricter(name: str, act: str, kind: str) -> bool:
    """Whether more may go than below (docs/explain/mount-semantics.md)."""
    is_written = act in STRICTER_FOR_ROOT or (is_plain() and act == "copy_range")  # by the kernel: it reads and writes
    return (name == "root" and is_written) or act == "write_by_mmap" or kind == MANDATORY_LOCKING


def has_less(one: Left, other: Left) -> bool:
    """Whether one has what the other has, but for bits and capabilities."""
    bits, all_ = int(one.mode, 8), int(other.mode, 8)
    return bits | BITS == all_ | BITS and not bits & ~all_ and one.has_capability <= other.has_capability


@pytest.mark.parametrize("name", EVERYBODY)
def test_what_goes_on_the_filesystem_below_goes_here(mount: Mounted, volume: Path, name: str) -> None:
    native = played(volume / f"{mount.backing.name} {name}", EVERYBODY[name])
    ours = played(mount.path / name, EVERYBODY[name])
    unlike = []
    for case, (right_answer, right) in native.items():
        answer, seen = ours[case]
        behind = left(mount.backing / name / " ".join(case))
        is_right = has_less(seen, right) if may_be_stricter(name, *case) else seen == right
        if (answer != right_answer and MANDATORY_LOCKING not in case) or not is_right or behind != seen:
            unlike.append(f"{case}: {answer}, {seen}, {behind} behind; below {right_answer}, {right}")
    assert not unlike, "\n".join(unlike)


@pytest.mark.takes_engine
def test_what_is_refused_takes_nothing_away(mount: Mounted) -> None:
    path = mount.path / "allocated"
    made(path, "both")
    with path.open("r+b") as file, pytest.raises(OSError, match=r"not supported|too large"):
        fallocate(file.fileno(), 0, 0, (1 << 63) - 1)
    assert left(path) == left(mount.backing / "allocated")
    assert path.stat().st_size == len(b"content")


def test_bits_set_behind_the_mount_go_when_somebody_writes(mount: Mounted) -> None:
    path, behind = mount.path / "late", mount.backing / "late"
    made(path, "nothing")
    with path.open("r+b", buffering=0) as file:
        file.write(b"x")
        _set_bits(behind, "both")
        as_user(EVERYBODY["stranger"].uid, lambda: os.pwrite(file.fileno(), b"x", 0))
    assert left(behind).mode == "0777"


@pytest.mark.parametrize("roots_is_first", [True, False])
@pytest.mark.parametrize(
    "act",
    [
        *(act for act in USES_FD if act not in ("write_in_turns", "write_nothing", *BLOCKS)),
        *(pytest.param(act, marks=pytest.mark.takes_engine) for act in BLOCKS),
        "write",
        "truncate",
    ],
)
def test_the_bit_of_roots_group_goes_whoever_opened_the_file_first(
    mount: Mounted, volume: Path, act: str, roots_is_first: bool
) -> None:
    """Whose group may not execute it. All who have it open are passed through as who opened it first."""
    openers: list[Callable[[Path], int]] = [
        lambda path: os.open(path, os.O_RDWR),
        lambda path: call_as(ThreadCredentials(OWNER, GROUP), os.open, path, os.O_RDWR),
    ]
    seen = []
    for top in (volume, mount.path):
        place = top / f"{act} {roots_is_first}"
        place.mkdir()
        (place / "source").write_bytes(b"source")
        (place / "file").write_bytes(b"content")
        os.chown(place / "file", OWNER, 0)
        fds = [opened(place / "file") for opened in (openers if roots_is_first else reversed(openers))]
        (place / "file").chmod(0o2666)
        as_user(OWNER, lambda place=place, fd=fds[roots_is_first]: ACTS[act](place / "file", fd), gid=GROUP)  # type: ignore[misc]
        for fd in fds:
            os.close(fd)
        seen.append(left(place / "file"))
        shutil.rmtree(place)
    assert seen[0] == seen[1] == Left("0666", has_capability=False)
