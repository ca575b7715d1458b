"""Writing a line into a registry: whatever becomes of that, the swap is done, no other line is lost, and it is told."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType

import pytest

from fusefs.linux.file_locks import take
from fusefs.store.registry_lines import MAX_BYTES, MAX_LINES, decode, encode
from tests.support.crash_scenarios import EVERY_CALL
from tests.support.make_trees import Dir, make_tree
from tests.support.other_users import as_user, become
from tests.support.real_filesystems import bind_mount, btrfs_subvolume, full, loop_volume, tmpfs_volume
from tests.support.store_verbs import DyingAt, forked, in_child, init, raw, swap, use
from tests.support.trashd_command import CommandResult
from tests.support.user_homes import ALICE, BOB, homes, line_of, registry_of, trashd_as

pytestmark = pytest.mark.needs("root")

NOT_NOTED = "  not noted in your registry of stores ("
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
    return [Path(os.fsdecode(line.path)) for line in decode(registry_of(home).read_bytes())]


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

    for n in range(0, 5000, 1 if EVERY_CALL else 9):
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
    lock = take(raw(state / "trashd"), b"stores.lock")
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
    lines = (encode(there._replace(volume=type(there.volume)(f"{n:032x}"))) for n in range(MAX_LINES))
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
        (kept_locked, "another process keeps its lock"),
        (anothers, f"it belongs to uid {BOB}"),
        (full_of_stores, "it is full of stores that are there"),
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
