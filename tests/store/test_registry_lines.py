"""Registries: what users put into one costs others nothing, and a line that can't be written loses no other."""

import ctypes
import errno
import fcntl
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType

import pytest

from fusefs.linux.file_locks import take_lock
from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import read_mounts
from fusefs.linux.untrusted_path import open_untrusted
from fusefs.store.registry_lines import MAX_BYTES, MAX_LINES, RegistryLine, decode_lines, encode_line
from fusefs.store.store_registry import UserLine, open_registered, stores_of_users
from tests.support.covering_sets import runs_every_case
from tests.support.fuse_silent import silent_fuse
from tests.support.make_trees import Dir, make_tree
from tests.support.other_users import as_user, become
from tests.support.real_filesystems import bind_mount, btrfs_subvolume, full, loop_volume, tmpfs_volume, unmount
from tests.support.store_verbs import DyingAt, forked, in_child, init, raw, swap, use
from tests.support.trashd_command import CommandResult
from tests.support.user_homes import ALICE, BOB, homes, line_of, registry_of, trashd_as

pytestmark = pytest.mark.needs("root")


_PROTOCOL = 5
_CATATONIC = 0x9362
"""AUTOFS_IOC_CATATONIC: processes that wait are let go."""


@contextmanager
def resting(point: Path, kind: str = "direct") -> Iterator[Callable[[], bool]]:
    """An automount point that rests; tells whether it was woken. kind: direct, or indirect: each name in it is one

    Who wakes it waits to the end of the block. Source  the kernel's Documentation/filesystems/autofs.rst
    """
    libc = ctypes.CDLL(None, use_errno=True)
    wanted, theirs = os.pipe()
    ready, end = os.pipe(), os.pipe()
    daemon = os.fork()  # what its process group asks is never asked of it
    if daemon == 0:
        _end_it(point, ready, end)
    os.close(end[0])
    os.read(ready[0], 1)
    options = f"fd={theirs},pgrp={daemon},minproto={_PROTOCOL},maxproto={_PROTOCOL},{kind}".encode()
    try:
        if libc.mount(b"tests", os.fsencode(point), b"autofs", ctypes.c_ulong(0), options):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        yield lambda: bool(select.select([wanted], [], [], 0)[0])
    finally:
        os.write(end[1], b".")
        os.close(end[1])
        os.waitpid(daemon, 0)
        unmount(point)
        for fd in (wanted, theirs, *ready):
            os.close(fd)


def _end_it(point: Path, ready: tuple[int, int], end: tuple[int, int]) -> None:
    """The daemon's life: when it is not needed any more, nothing waits for it."""
    try:
        os.setpgid(0, 0)
        os.close(end[1])
        os.write(ready[1], b".")
        os.read(end[0], 1)
        fcntl.ioctl(os.open(point, os.O_RDONLY | os.O_DIRECTORY), _CATATONIC)
    finally:
        os._exit(0)


LIMIT_S = 30.0
"""For what takes a fraction of a second on a machine that is not busy, and for ever where it waits."""


@pytest.fixture
def users() -> Iterator[tuple[Path, Path]]:
    """The homes of Alice and of Bob, each with an own store and an orphan in it."""
    with homes(ALICE, BOB) as made:
        for uid, home in made.items():
            job = make_tree(home / "job", {})
            os.chown(job, uid, uid)
            assert trashd_as(uid, home, "swap", job).code == 0
        yield made[ALICE], made[BOB]


def heard() -> list[tuple[int, Path]]:
    """The stores of users that root opens, and for which user."""
    kernel, mounts = Kernel(), read_mounts()
    found = []
    for word in stores_of_users(kernel, mounts):
        store = open_registered(kernel, word, mounts)
        if store is not None:
            with store:
                assert store.owner == word.uid
                found.append((word.uid, Path(os.fsdecode(word.line.path))))
    return sorted(found)


def line_text(home: Path) -> RegistryLine:
    (line,) = decode_lines(registry_of(home).read_bytes())
    return line


def says(home: Path, uid: int, *lines: RegistryLine) -> None:
    registry_of(home).write_bytes(b"".join(map(encode_line, lines)))
    os.chown(registry_of(home), uid, uid)


def test_root_hears_of_both(users: tuple[Path, Path]) -> None:
    alice, bob = users
    assert heard() == [(ALICE, alice), (BOB, bob)]


def _link(registry: Path) -> None:
    registry.rename(registry.with_name("aside"))
    registry.symlink_to("aside")


def _hers(make: Callable[[Path], None], registry: Path) -> None:
    registry.unlink()
    make(registry)
    os.chown(registry, ALICE, ALICE)


def _directory_is_a_link(registry: Path) -> None:
    _link(registry.parent)
    os.lchown(registry.parent, ALICE, ALICE)


SPOIL: dict[str, Callable[[Path], object]] = {
    "link": _link,
    "second_name": lambda registry: os.link(registry, registry.with_name("aside")),
    "fifo": partial(_hers, os.mkfifo),
    "directory": partial(_hers, os.mkdir),
    "ten_megabytes": lambda registry: registry.write_bytes(registry.read_bytes() + b"\n" * (10 << 20)),
    "hole": lambda registry: os.truncate(registry, 1 << 40),
    "anothers": lambda registry: os.chown(registry, BOB, BOB),
    "writable": lambda registry: registry.chmod(0o620),
    "directory_writable": lambda registry: registry.parent.chmod(0o777),
    "directory_is_a_link": _directory_is_a_link,
}


@pytest.mark.parametrize("how", SPOIL)
def test_what_is_no_registry_of_his_alone_is_not_read(users: tuple[Path, Path], how: str) -> None:
    alice, bob = users
    SPOIL[how](registry_of(alice))
    began_s = time.monotonic()
    assert heard() == [(BOB, bob)]
    assert time.monotonic() - began_s < LIMIT_S


def test_ten_thousand_lines_are_not_read_and_a_thousand_cost_little(users: tuple[Path, Path]) -> None:
    alice, bob = users
    line = line_text(alice)
    registry_of(alice).write_bytes(encode_line(line) + b"/\n" * 10_000)
    assert heard() == [(ALICE, alice), (BOB, bob)]
    registry_of(alice).write_bytes(b"/\n" * MAX_LINES + encode_line(line))
    assert heard() == [(BOB, bob)]


def test_a_path_through_a_link_of_his_leads_nowhere(users: tuple[Path, Path]) -> None:
    alice, bob = users
    line = line_text(alice)
    (alice / "link").symlink_to(alice)
    os.lchown(alice / "link", ALICE, ALICE)
    says(alice, ALICE, line._replace(path=raw(alice / "link")))
    assert heard() == [(BOB, bob)]


def test_a_path_through_a_link_of_roots_is_gone(users: tuple[Path, Path]) -> None:
    alice, bob = users
    (alice.parent / "link").symlink_to(alice.name)
    line = line_text(alice)
    says(alice, ALICE, line._replace(path=raw(alice.parent / "link")))
    assert heard() == [(ALICE, alice.parent / "link"), (BOB, bob)]


def test_a_link_of_roots_that_a_user_may_have_moved_is_not_gone(users: tuple[Path, Path]) -> None:
    alice, bob = users
    (alice / "link").symlink_to(alice)  # root's, in a directory of hers
    says(alice, ALICE, line_text(alice)._replace(path=raw(alice / "link")))
    assert heard() == [(BOB, bob)]


def test_anothers_store_is_not_served_by_his_word(users: tuple[Path, Path]) -> None:
    alice, bob = users
    says(alice, ALICE, line_text(bob))
    registry_of(bob).unlink()
    assert heard() == []


def test_a_store_of_roots_is_not_served_by_his_word(users: tuple[Path, Path]) -> None:
    alice, bob = users
    backup = make_tree(alice.parent / "backup", {})
    init(backup)
    (known,) = [line for line in decode_lines(Path("/var/lib/trashd/stores").read_bytes()) if line.path == raw(backup)]
    says(alice, ALICE, known)
    assert heard() == [(BOB, bob)]


@pytest.mark.needs("fuse")
def test_what_he_has_mounted_is_not_asked_for_anything(users: tuple[Path, Path]) -> None:
    alice, bob = users
    (alice / "dead").mkdir()
    with silent_fuse(alice / "dead", ALICE) as fuse:
        says(alice, ALICE, line_text(alice)._replace(path=raw(alice / "dead/deep")), line_text(alice))
        assert heard() == [(ALICE, alice), (BOB, bob)]
        assert select.select([fuse], [], [], 0)[0] == []


@pytest.mark.needs("fuse")
def test_a_dead_mount_of_roots_keeps_nobody_waiting_for_another_store(users: tuple[Path, Path]) -> None:
    alice, bob = users
    (alice.parent / "dead").mkdir()
    line = line_text(alice)
    with silent_fuse(alice.parent / "dead", 0):
        says(alice, ALICE, line._replace(path=raw(alice.parent / "dead/deep")), line)
        assert heard() == [(ALICE, alice), (BOB, bob)]


@pytest.mark.needs("fuse")
def test_a_dead_home_keeps_nobody_waiting_for_another(users: tuple[Path, Path]) -> None:
    alice, bob = users
    with silent_fuse(alice, 0):
        assert heard() == [(BOB, bob)]


@pytest.mark.parametrize("kind", ["direct", "indirect"])
@pytest.mark.parametrize("below", ["", "home", "home/deeper"])
def test_no_automount_is_woken(users: tuple[Path, Path], kind: str, below: str) -> None:
    alice, bob = users
    point = alice.parent / "net"
    point.mkdir()
    with resting(point, kind) as is_woken:
        says(alice, ALICE, line_text(alice)._replace(path=raw(point / below)))
        assert heard() == [(BOB, bob)]
        assert not is_woken()


def test_who_has_no_registry_costs_no_process(users: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    alice, bob = users
    registry_of(alice).unlink()
    forks, fork = [], os.fork

    def counted() -> int:
        pid = fork()
        forks.append(pid)
        return pid

    monkeypatch.setattr(os, "fork", counted)
    kernel, mounts = Kernel(), read_mounts()
    assert [Path(os.fsdecode(word.line.path)) for word in stores_of_users(kernel, mounts)] == [bob]
    assert len(forks) == 4  # the accounts, who has one, Bob's, and where its line leads


def test_the_way_ends_at_what_is_no_directory(users: tuple[Path, Path]) -> None:
    alice, _bob = users
    (alice / "file").touch()
    with pytest.raises(NotADirectoryError):
        open_untrusted(Kernel(), raw(alice / "file"), read_mounts(), (0, ALICE))


def test_the_way_ends_at_what_another_user_has_mounted(users: tuple[Path, Path]) -> None:
    alice, _bob = users
    (point := alice / "mount").mkdir()
    with bind_mount(alice.parent, point):
        mounts = [one._replace(owner=ALICE) if one.point == raw(point) else one for one in read_mounts()]
        open_untrusted(Kernel(), raw(point), mounts, (0, ALICE)).close()
        with pytest.raises(OSError, match=os.strerror(errno.EXDEV)):
            open_untrusted(Kernel(), raw(point), mounts, (0,))


def test_a_line_of_a_user_opens_nothing_for_root_himself(users: tuple[Path, Path]) -> None:
    alice, _bob = users
    assert open_registered(Kernel(), UserLine(0, line_text(alice)), read_mounts()) is None


NOT_NOTED = "  this store is not in your registry ("
SYSTEM = ("posix", "fcntl", "_io")
"""Where the functions are that call the kernel."""


@pytest.fixture
def alice() -> Iterator[Path]:
    """Alice's home; no registry names a store."""
    with homes(ALICE) as made:
        yield made[ALICE]


def work_in(home: Path, name: str | bytes) -> Path:
    """A directory of Alice's on the disk of her home, beside that; she has no store there."""
    work = Path(os.fsdecode(os.path.join(raw(home.parents[1]), os.fsencode(name))))
    return make_tree(work, Dir({"job": Dir({"file": "x"}, owner=(ALICE, ALICE))}, owner=(ALICE, ALICE)))


def store_in(home: Path, name: str) -> Path:
    """A store of hers that her registry names."""
    base = work_in(home, name)
    as_user(ALICE, lambda: _at_home(home, partial(init, base)))
    return base


def _at_home(home: Path, act: Callable[[], object]) -> None:
    os.environ["HOME"] = str(home)
    os.environ.pop("XDG_STATE_HOME", None)
    act()


def named(home: Path) -> list[Path]:
    return [Path(os.fsdecode(line.path)) for line in decode_lines(registry_of(home).read_bytes())]


def swapped(home: Path, work: Path, state: Path | None = None) -> CommandResult:
    """Her command throws something away there, whatever becomes of the note."""
    job = work / "job"
    told = trashd_as if state is None else partial(trashd_as, XDG_STATE_HOME=str(state))
    done = told(ALICE, home, "swap", job)
    assert done.code == 0, done
    assert list(job.iterdir()) == []
    (tree,) = work.glob(f".trashd-{ALICE}/u/{ALICE}/orphans/*/tree")
    assert (tree / "file").read_text() == "x"
    return done


class Dying:
    """What sys.setprofile calls: the process ends before its n-th call (from 0) of a function that asks the kernel."""

    def __init__(self, n: int) -> None:
        self.left = n

    def __call__(self, _frame: FrameType, event: str, called: object) -> None:
        module = getattr(called, "__module__", None) or type(getattr(called, "__self__", None)).__module__
        if event == "c_call" and module in SYSTEM:
            if self.left == 0:
                os._exit(DyingAt.EXIT_CODE)
            self.left -= 1


def test_killed_at_any_call_of_the_first_use_it_loses_no_line_and_the_next_use_notes_the_store(alice: Path) -> None:
    before = [store_in(alice, "first"), store_in(alice, "second")]
    work = store_in(alice, "work")
    text = registry_of(alice).read_bytes()

    def first_use(n: int) -> None:
        become(ALICE)
        sys.setprofile(Dying(n))
        _at_home(alice, partial(use, work))
        sys.setprofile(None)

    for n in range(0, 5000, 1 if runs_every_case() else 9):
        registry_of(alice).write_bytes(b"".join(line + b"\n" for line in text.splitlines()[:2]))
        code = in_child(partial(first_use, n))
        assert code in (0, DyingAt.EXIT_CODE)
        assert named(alice) in ([*before], [*before, work]), f"killed before call {n}"
        as_user(ALICE, lambda: _at_home(alice, partial(use, work)))
        assert named(alice) == [*before, work], f"killed before call {n}"
        if code == 0:
            break
    assert n > 50


@contextmanager
def full_disk(_home: Path) -> Iterator[Path]:
    """Where her state is, no block and no inode is left."""
    with tmpfs_volume("1m", ["nr_inodes=100"]) as state:
        os.chown(state, ALICE, ALICE)
        with full(state):
            yield state


@contextmanager
def full_quota(_home: Path) -> Iterator[Path]:
    """The subvolume that her state is in has a limit."""
    with loop_volume("btrfs") as volume:
        state = btrfs_subvolume(volume, "state", 1 << 20)
        make_tree(state / "trashd", Dir(mode=0o700, owner=(ALICE, ALICE)))
        with suppress(OSError), (state / "filling").open("wb", 0) as file:
            while True:
                file.write(os.urandom(4096))
                os.fsync(file)
        yield state


@contextmanager
def read_only(_home: Path) -> Iterator[Path]:
    with tmpfs_volume() as state, bind_mount(state, state, ["ro"]):
        yield state


@contextmanager
def a_file(home: Path) -> Iterator[Path]:
    (home / "state").write_text("no directory")
    yield home / "state"


@contextmanager
def kept_locked(home: Path) -> Iterator[Path]:
    """Another process of hers is about to write, and was stopped."""
    state = make_tree(home / "state", Dir({"trashd": Dir(mode=0o700, owner=(ALICE, ALICE))}, owner=(ALICE, ALICE)))
    lock = take_lock(raw(state / "trashd"), b"stores.lock")
    assert lock is not None
    os.chown(state / "trashd/stores.lock", ALICE, ALICE)
    with lock:
        yield state


@contextmanager
def anothers(home: Path) -> Iterator[Path]:
    state = make_tree(home / "state", Dir({"trashd": Dir({"stores": b""}, mode=0o700, owner=(ALICE, ALICE))}))
    os.chown(state / "trashd/stores", BOB, BOB)
    yield state


@contextmanager
def full_of_stores(home: Path) -> Iterator[Path]:
    """So many lines as it may have, each of a store that is there."""
    there = line_of(store_in(home, "there"))
    lines = (encode_line(there._replace(volume=type(there.volume)(f"{n:032x}"))) for n in range(MAX_LINES))
    text = b"".join(lines)[: MAX_BYTES - 10]
    yield _state_that_says(home, text[: text.rindex(b"\n") + 1])


def _state_that_says(home: Path, text: bytes) -> Path:
    state = make_tree(home / "state", Dir({"trashd": Dir({"stores": text}, mode=0o700, owner=(ALICE, ALICE))}))
    os.chown(state / "trashd/stores", ALICE, ALICE)
    (state / "trashd/stores").chmod(0o600)
    return state


@pytest.mark.parametrize(
    ("where", "why"),
    [
        (full_disk, "No space left on device"),
        pytest.param(full_quota, "Disk quota exceeded", marks=pytest.mark.needs("loop", "btrfs")),
        (read_only, "Read-only file system"),
        (a_file, "Not a directory"),
        (kept_locked, "another process holds the registry's lock"),
        (anothers, f"it belongs to uid {BOB}"),
        (full_of_stores, "the registry is full of stores that still exist"),
    ],
)
def test_where_it_can_not_be_noted_the_swap_says_so_in_a_line_and_leaves_what_is_there(
    alice: Path, where: Callable[[Path], AbstractContextManager[Path]], why: str
) -> None:
    work = work_in(alice, "work")
    with where(alice) as state:
        registry = state / "trashd/stores"
        before = registry.read_bytes() if registry.is_file() else None
        done = swapped(alice, work, state)
        told = [line for line in done.out.splitlines() if line.startswith(NOT_NOTED)]
        assert len(told) == 1
        assert why in told[0]
        assert f"  undo  trashd restore --volume {work} " in done.out
        assert (registry.read_bytes() if registry.is_file() else None) == before


def test_who_has_no_home_is_told_too(alice: Path) -> None:
    """Not the accounts' word: a service's user whose home was never made."""
    done = swapped(Path("/nonexistent"), work_in(alice, "work"))
    assert "(" + "Permission denied" in done.out


def test_what_is_noted_is_not_told_again(alice: Path) -> None:
    work = work_in(alice, "work")
    assert NOT_NOTED not in swapped(alice, work).out
    assert named(alice) == [work]


def test_processes_that_write_at_once_lose_no_line(alice: Path) -> None:
    first = store_in(alice, "first")
    works = [work_in(alice, f"work{n}") for n in range(8)]
    go, told = os.pipe(), []

    def act(work: Path) -> None:
        become(ALICE)
        os.close(go[1])
        os.read(go[0], 1)
        _at_home(alice, lambda: _noted(swap(work / "job").unnoted, work))

    def _noted(unnoted: str, work: Path) -> None:
        (work / "told").write_text(unnoted)

    pids = [forked(partial(act, work)) for work in works]
    os.close(go[1])
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * len(works)
    os.close(go[0])
    told = [work for work in works if (work / "told").read_text()]
    assert {first, *works} - set(told) <= set(named(alice))
    assert len(told) < len(works)


def test_garbage_in_a_registry_keeps_no_line_out_and_costs_none(alice: Path) -> None:
    first = store_in(alice, "first")
    line = registry_of(alice).read_bytes()
    garbage = [b"\xff\x00garbage\n", line.replace(b"/", b"//", 1), line[:40] + b"\n", b"\n" * 100]
    registry_of(alice).write_bytes(b"".join([*garbage, line, os.urandom(1000).replace(b"\n", b"") + b"\n"]))
    work = work_in(alice, "work")
    assert NOT_NOTED not in swapped(alice, work).out
    assert named(alice) == [first, work]


NAMES = [b"new\nline", b"\xff\xfe", b"a" * 255, b"-rf", b"%41 %", b"\x1b[31m", b" ", b"'\""]


def test_a_store_in_a_directory_of_any_name_is_noted_and_found(alice: Path) -> None:
    works = [work_in(alice, name) for name in NAMES]
    for work in works:
        as_user(ALICE, lambda: _at_home(alice, partial(swap, work / "job")))  # noqa: B023  called here
    assert named(alice) == works
    listed = trashd_as(ALICE, alice, "list", "--json").objects()
    assert {Path(one["path"]).parents[4] for one in listed} == set(works)
