"""Any history of files, links, renames, exchanges and open handles: the mount answers as the native filesystem does.

Hypothesis draws the history. One mount serves all of them, each in a fresh directory; its twin is a directory on the
same filesystem that no FUSE is in front of. So with caches on, off and tiny, whatever else may change the tree, and
whether the backing filesystem is waited for in threads or not.
"""

import errno
import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from fusefs.linux.syscalls import RENAME_EXCHANGE, RENAME_NOREPLACE
from tests.support.foreground_mount import Mounted, trashd_mount
from tests.support.fuse_slow import slow_volume
from tests.support.oracle_subjects import Handle, Native, outcome
from tests.support.real_filesystems import volume_of
from tests.support.transports import is_by_device

pytestmark = pytest.mark.needs("root", "fuse", "loop")

N_FDS_LEAST = 72  # leaves the daemon two or three directories at a time
N_EXAMPLES = 500  # of all together, unless the profile wants more of each
PROFILE = settings()
IS_LONG = PROFILE.max_examples > N_EXAMPLES
LIMIT_S = 100_000 if IS_LONG else 390
"""Of a case: a soak's takes hours."""
NAMES = st.sampled_from([b"a", b"b", b"c", b"\xff\n", b"x" * 255])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map(b"/".join)
FLAGS = st.sampled_from([0, 0, RENAME_NOREPLACE, RENAME_EXCHANGE])
OPEN_FLAGS = st.sampled_from(
    [
        os.O_RDONLY,
        os.O_RDWR,
        os.O_RDWR | os.O_CREAT,
        os.O_WRONLY | os.O_CREAT | os.O_EXCL,
        os.O_RDWR | os.O_APPEND,
        os.O_RDWR | os.O_TRUNC | os.O_CREAT,
        os.O_RDONLY | os.O_DIRECTORY,
    ]
)
MODES = st.integers(0, 0o1777)  # suid: test_callers, where who writes makes a difference
DATA = st.binary(max_size=40) | st.integers(0, 255).map(lambda byte: bytes([byte]) * 9000)
OFFSETS = st.integers(0, 60) | st.integers(0, 20_000)
HANDLES = st.integers(0, 3)


def attributes(path: bytes) -> tuple[int, ...]:
    """All but the numbers: a deleted file that is still open keeps its inode number from the next."""
    st = os.lstat(path)
    times = st.st_atime_ns, st.st_mtime_ns, st.st_ctime_ns
    return st.st_mode, st.st_nlink, st.st_uid, st.st_gid, st.st_rdev, st.st_size, *times


class MountMachine(RuleBasedStateMachine):
    """Two directories, and up to four handles open in both at the same things."""

    mounted: Mounted
    twin: Path  # where the native directories are
    numbers = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        name = f"example{next(self.numbers)}"
        self.tops = [self.mounted.path / name, self.twin / name]
        for top in self.tops:
            top.mkdir()
        self.both = [Native("mount", self.tops[0]), Native("native", self.tops[1])]
        self.behind = os.fsencode(self.mounted.backing / name)
        self.handles: dict[int, list[Handle]] = {}
        self.n_aside = 0

    def agree(self, call: Callable[[Native], object]) -> None:
        """A call answers the same on both sides."""
        seen, right = (outcome(call, one) for one in self.both)
        assert seen == right

    @rule(path=PATHS, data=DATA, offset=OFFSETS)
    def write(self, path: bytes, data: bytes, offset: int) -> None:
        def act(s: Native) -> int:
            handle = s.open(path, os.O_RDWR | os.O_CREAT, 0o640)
            try:
                return s.pwrite(handle, data, offset)
            finally:
                s.close(handle)

        self.agree(act)

    @rule(path=PATHS)
    def mkdir(self, path: bytes) -> None:
        self.agree(lambda s: s.mkdir(path, 0o750))

    @rule(path=PATHS)
    def rmdir(self, path: bytes) -> None:
        self.agree(lambda s: s.rmdir(path))

    @rule(path=PATHS)
    def unlink(self, path: bytes) -> None:
        self.agree(lambda s: s.unlink(path))

    @rule(old=PATHS, new=PATHS, flags=FLAGS)
    def rename(self, old: bytes, new: bytes, flags: int) -> None:
        self.agree(lambda s: s.rename(old, new, flags))

    @rule(old=PATHS, new=PATHS)
    def link(self, old: bytes, new: bytes) -> None:
        self.agree(lambda s: s.link(old, new))

    @rule(to=PATHS, path=PATHS)
    def symlink(self, to: bytes, path: bytes) -> None:
        self.agree(lambda s: s.symlink(to, path))

    @rule(path=PATHS, mode=MODES)
    def chmod(self, path: bytes, mode: int) -> None:
        self.agree(lambda s: s.chmod(path, mode))

    @rule(path=PATHS, size=OFFSETS)
    def truncate(self, path: bytes, size: int) -> None:
        self.agree(lambda s: s.truncate(path, size))

    @rule(path=PATHS, ns=st.integers(-(10**12), 10**19 // 5))
    def utime(self, path: bytes, ns: int) -> None:
        self.agree(lambda s: s.utime(path, ns, ns + 1))
        self.agree(lambda s: s.times(path))

    @rule(path=PATHS, value=st.binary(max_size=20))
    def xattr(self, path: bytes, value: bytes) -> None:
        self.agree(lambda s: s.setxattr(path, "user.x", value))
        self.agree(lambda s: s.getxattr(path, "user.x"))

    @rule(path=PATHS)
    def see(self, path: bytes) -> None:
        """What is there, or that there is nothing."""
        self.agree(lambda s: s.stat(path))
        self.agree(lambda s: s.listxattr(path))

    @rule(path=PATHS)
    def swap(self, path: bytes) -> None:
        """What `trashd swap` does to the names: an empty directory comes in, the old one leaves whole."""
        self.n_aside += 1
        aside = b"aside%d" % self.n_aside

        def act(s: Native) -> None:
            s.mkdir(aside)
            s.rename(aside, path, RENAME_EXCHANGE)

        self.agree(act)

    @rule(number=st.integers(1, 3), path=PATHS)
    def restore(self, number: int, path: bytes) -> None:
        self.agree(lambda s: s.rename(b"aside%d" % number, path, RENAME_NOREPLACE))

    @rule(slot=HANDLES, path=PATHS, flags=OPEN_FLAGS)
    def open(self, slot: int, path: bytes, flags: int) -> None:
        self.close(slot)
        opened, told = [], []
        for one in self.both:
            try:
                opened.append(one.open(path, flags, 0o644))
                told.append("opened")
            except OSError as error:
                told.append(errno.errorcode[error.errno or 0])
        if opened:
            self.handles[slot] = opened
        assert told[0] == told[1]

    def by_handle(self, slot: int, call: Callable[[Native, Handle], object]) -> None:
        """A call answers the same by the two handles of a slot, if they are there."""
        if slot in self.handles:
            seen, right = (outcome(call, *pair) for pair in zip(self.both, self.handles[slot], strict=True))
            assert seen == right

    @rule(slot=HANDLES, data=DATA, offset=OFFSETS)
    def pwrite(self, slot: int, data: bytes, offset: int) -> None:
        self.by_handle(slot, lambda s, h: s.pwrite(h, data, offset))

    @rule(slot=HANDLES, to=HANDLES, offset=OFFSETS, to_offset=OFFSETS, size=OFFSETS)
    def copy_range(self, slot: int, to: int, offset: int, to_offset: int, size: int) -> None:
        """By the filesystem below; where that can't, by the kernel, page by page."""

        def act(s: Native, h: Handle) -> int:
            other = self.handles[to][self.both.index(s)]
            return os.copy_file_range(h.number, other.number, size, offset, to_offset)

        if to in self.handles:
            self.by_handle(slot, act)

    @rule(slot=HANDLES, size=OFFSETS)
    def ftruncate(self, slot: int, size: int) -> None:
        self.by_handle(slot, lambda s, h: s.ftruncate(h, size))

    @rule(slot=HANDLES)
    def look(self, slot: int) -> None:
        self.by_handle(slot, lambda s, h: s.fstat(h))
        self.by_handle(slot, lambda s, h: s.pread(h, 30_000, 0))
        self.by_handle(slot, lambda _, h: sorted(os.listdir(h.number)))

    @rule(slot=HANDLES, name=NAMES)
    def make_by_handle(self, slot: int, name: bytes) -> None:
        """In a directory that may have moved, or be gone."""
        self.by_handle(slot, lambda _, h: os.mkdir(name, 0o700, dir_fd=h.number))

    @rule(slot=HANDLES)
    def close(self, slot: int) -> None:
        self.by_handle(slot, lambda s, h: s.close(h))
        self.handles.pop(slot, None)

    @rule()
    def forget(self) -> None:
        """Memory gets short: what is not in use is forgotten."""
        self.mounted.forget_all()

    @invariant()
    def trees_are_equal_and_nothing_is_stale(self) -> None:
        """First what is remembered of attributes: reading the tree asks for them again."""
        tree = self.both[1].tree()
        for path in tree:
            assert outcome(attributes, self.both[0].top + b"/" + path) == outcome(attributes, self.behind + b"/" + path)
        assert self.both[0].tree() == tree

    def teardown(self) -> None:
        for slot in list(self.handles):
            self.close(slot)
        for top in self.tops:
            shutil.rmtree(top)


class Case(NamedTuple):
    """A mount, and how many histories it gets."""

    name: str
    n_examples: int
    options: Sequence[str]
    fs_type: str = "ext4"  # gives a free inode number to the next file at once
    n_fds_max: int = 1024


EXCLUSIVE, SHARED, SLOW, TINY = "coherence=exclusive", "coherence=shared", "backing=slow", "cache_size=4K"
CASES = [
    Case("ext4", 120, [EXCLUSIVE]),
    Case("ext4 without caches", 50, [SHARED, "timeout=0"]),
    Case("ext4 shared", 50, [SHARED, "timeout=3600"]),
    Case("ext4 in threads", 50, [EXCLUSIVE, SLOW]),
    Case("ext4 in threads without the daemon's cache", 30, [EXCLUSIVE, SLOW, "cache_size=0"]),
    Case("ext4 in threads, shared, with a tiny cache", 40, [SHARED, "timeout=3600", SLOW, TINY]),
    # Has no file handles: all is found by its names.
    Case("overlay", 50, [EXCLUSIVE], "overlay", N_FDS_LEAST),
    Case("overlay in threads with a tiny cache", 30, [EXCLUSIVE, SLOW, TINY], "overlay", N_FDS_LEAST),
    Case("slowfs", 30, [EXCLUSIVE, SLOW], "slowfs"),
]


@contextmanager
def slow_ext4() -> Iterator[Path]:
    with volume_of("ext4") as path, slow_volume(path, delay_us=0) as slow:
        yield slow.path


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S + 10)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_mount_agrees_over_any_history(case: Case) -> None:
    # The ring has the same engine and tables, and plain mode takes several times as long.
    n_examples = case.n_examples if is_by_device() else case.n_examples // 4
    chosen = settings(
        PROFILE,
        max_examples=PROFILE.max_examples // len(CASES) if IS_LONG else n_examples,
        stateful_step_count=PROFILE.stateful_step_count if IS_LONG else 30,
        suppress_health_check=list(HealthCheck),
    )
    with slow_ext4() if case.fs_type == "slowfs" else volume_of(case.fs_type) as volume:
        (volume / "twin").mkdir()
        mount = trashd_mount(volume / "mount", None, case.options, limit_s=LIMIT_S, n_fds_max=case.n_fds_max)
        with mount as mounted:

            class Machine(MountMachine):
                pass

            Machine.mounted, Machine.twin = mounted, volume / "twin"
            run_machine(Machine, settings=chosen)
