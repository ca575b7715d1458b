"""Scenes: a volume made ready for one act, which a test then kills, fails, stops or races; and what must hold after."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from fusefs.core.container_states import State
from fusefs.core.errors import TrashdError
from fusefs.core.names import STORE, parse_uid_name
from fusefs.linux import syscalls
from fusefs.linux.kernel import CallHook, Kernel
from fusefs.store.layout import VOLUME, WATCH_PREFIXES, Volume, decode_volume, encode_volume
from tests.support.covering_sets import runs_every_case, share_of
from tests.support.make_trees import EntrySnapshot, snapshot
from tests.support.other_users import as_user, become, query_without_fork
from tests.support.shared_memory_children import call_in_child, code_of_child, end_process
from tests.support.store_verbs import (
    DyingAt,
    NumberedCall,
    assert_silent,
    init,
    numbered_calls,
    problems,
    recover_all,
)
from tests.support.user_homes import forget_stores

USER = 1000
HOME = "home"
NAME = "job"
_STORE = os.fsdecode(STORE)
_NO_TREES = ("record.json", "begun", *map(os.fsdecode, WATCH_PREFIXES))
_PR_SET_CHILD_SUBREAPER = 36
_CHANGING = frozenset(
    {
        "mkdir", "rmdir", "unlink", "rename", "renameat2", "exchange", "link", "create", "tmpfile", "write", "truncate",
        "chmod", "chown", "setxattr", "removexattr", "ioctl", "fallocate",
    }
)  # fmt: skip
_OF_UNNAMED = frozenset({"write", "fallocate", "link"})
LOOKING = frozenset(
    {
        "open", "openat2", "identify", "stat", "fstat", "statx", "statfs", "read", "refresh", "getdents", "listxattr",
        "getxattr",
        "flock", "lease", "fsync", "syncfs", "strangers",
    }
)  # fmt: skip
"""What a kill undoes, or cannot: the next process finds the same, killed before such a call or after it."""

STRIDE = 1 if runs_every_case() else 3
"""From one call before which something happens to the next, where it is not known which of them matter."""

T = TypeVar("T")
Tree = tuple[EntrySnapshot, ...]
Prepare = Callable[[Path], None]
Act = Callable[[Path, Kernel], object]


@dataclass(frozen=True, slots=True)
class CrashScenario:
    """One act on a volume that was made ready for it.

    prepare    run in an initialised store, as `uid`
    act        what is killed, failed, stopped or raced, as `by` (None: as `uid`)
    exchange   whether the store believes that the filesystem can exchange
    is_gapless the name must resolve at every moment, and in the end
    is_reap    the act lets go of an orphan: what is whole no more must not be an orphan
    is_split   the act takes a tree apart: each file's content must be somewhere once
    """

    prepare: Prepare
    act: Act
    uid: int = 0
    by: int | None = None
    exchange: bool = True
    is_gapless: bool = False
    is_reap: bool = False
    is_split: bool = False

    @query_without_fork()
    def set_up(self, volume: Path) -> VolumeContents:
        """The volume as the act finds it, from scratch, and what is in it."""
        wipe(volume)
        forget_stores()  # or each looks whether those before it, which are gone, are still there
        init(volume)
        if not self.exchange:
            forbid_exchange(volume)
        (volume / HOME).mkdir()
        if self.uid:
            os.chown(volume / HOME, self.uid, self.uid)
            as_user(self.uid, partial(self.prepare, volume))
        else:
            self.prepare(volume)
        return _read_contents_once(self, volume)

    def run(self, volume: Path, hook: CallHook) -> object:
        """Run the act in this process, which becomes the actor; return its result."""
        actor = self.uid if self.by is None else self.by
        if actor != os.geteuid():
            become(actor)
        return self.act(volume, Kernel(hook))

    def calls(self, volume: Path) -> list[NumberedCall]:
        """The calls that the act and its children make; the volume is to be set up again after it."""
        actor = self.uid if self.by is None else self.by
        count = partial(numbered_calls, partial(self.act, volume))
        return as_user(actor, count) if actor else count()


@cache
def _read_contents_once(_scenario: CrashScenario, volume: Path) -> VolumeContents:
    """Read the volume as a scenario sets it up, once: each of hundreds of set-ups makes the same contents."""
    return read_contents(volume)


class VolumeContents(NamedTuple):
    """What a volume held before the act: every tree that is not an empty directory, and every file's content."""

    trees: Counter[Tree]
    contents: Counter[str]
    head: EntrySnapshot | None


def home(volume: Path) -> Path:
    return volume / HOME / NAME


def wipe(volume: Path) -> None:
    for entry in volume.iterdir():
        if entry.is_dir() and entry.name != "lost+found":
            shutil.rmtree(entry)


def forbid_exchange(volume: Path) -> None:
    """Let a store believe that its filesystem can't exchange, as the probe would have found."""
    write_volume(volume, lambda found: found._replace(exchange=False))


def write_volume(volume: Path, change: Callable[[Volume], Volume]) -> None:
    path = volume / _STORE / os.fsdecode(VOLUME)
    found = decode_volume(path.read_bytes(), b"")
    assert found is not None
    path.write_bytes(encode_volume(change(found)))


def places(volume: Path) -> Iterator[Path]:
    """Everything that may be a tree: at home, dropped, or in a container of any state."""
    yield from (path for path in (volume / HOME).iterdir() if path not in _lower_stores(volume))
    for folder in user_folders(volume):
        yield from (folder / "drop").iterdir()
        for state in State:
            for container in (folder / state.value).iterdir():
                yield from _trees_in(container)


def _lower_stores(volume: Path) -> list[Path]:
    """Root's or a user's own, which a command makes where it can't use the upper one."""
    return _stores_in(volume / HOME)


def _stores_in(directory: Path) -> list[Path]:
    names = os.listdir(directory) if directory.exists() else []
    return [directory / name for name in names if name.startswith(_STORE)]


def _trees_in(container: Path) -> Iterator[Path]:
    """What is in a container, its transfer directories and the container that it took over."""
    for path in container.iterdir():
        if path.name == "old" or path.name.startswith("gate."):
            yield from _trees_in(path)
        elif not path.name.startswith(_NO_TREES):
            yield path


def user_folders(volume: Path) -> list[Path]:
    stores = [*_stores_in(volume), *_stores_in(volume / HOME)]  # users' own, too
    above = [store / name for store in stores for name in os.listdir(store) if name.startswith(("u", "n"))]
    found = [path / name for path in above for name in os.listdir(path)]
    return [
        path for path in found if parse_uid_name(os.fsencode(path.name)) is not None
    ]  # but for one that a kill left unmade


def orphans(volume: Path) -> list[Path]:
    return [path for folder in user_folders(volume) for path in (folder / "orphans").glob("*/tree")]


def read_contents(volume: Path) -> VolumeContents:
    """Read every place of the volume where a tree can be."""
    trees: Counter[Tree] = Counter()
    contents: Counter[str] = Counter()
    for place in places(volume):
        tree = snapshot(place)
        contents.update(one.content for one in tree if one.content)
        if len(tree) > 1 or not stat.S_ISDIR(tree[0].mode):
            trees[tree] += 1
    name = home(volume)
    return VolumeContents(trees, contents, snapshot(name)[0] if os.path.lexists(name) else None)


@query_without_fork()
def settle(volume: Path) -> None:
    """Recover in this, another process; then the checker has nothing to say, and nothing is left half done."""
    lower = volume / HOME
    uid = lower.stat().st_uid

    def find_problems() -> list[object]:
        # A lower store was made where the upper one could not be used; only its owner trusts it.
        checked = [volume, lower] if _lower_stores(volume) else [volume]
        return [*recover_all(lower), *(problem for path in checked for problem in problems(path))]

    found = as_user(uid, find_problems) if uid else find_problems()
    assert found == [], found
    if uid:
        assert recover_all(volume) == []  # what root held itself
    assert_nothing_half_done(volume)


def assert_settled(volume: Path) -> None:
    """The checker is silent, and not because something is still locked."""
    assert_nothing_half_done(volume)
    assert_silent(volume)


def assert_nothing_half_done(volume: Path) -> None:
    left = [path for folder in user_folders(volume) for state in ("stage", "restoring") for path in
            (folder / state).iterdir()]  # fmt: skip
    assert left == []


def assert_nothing_lost(scene: CrashScenario, volume: Path, before: VolumeContents) -> None:
    """Each tree is whole, unchanged, in exactly one place; the name resolves, to a tree or to its likeness."""
    after = read_contents(volume)
    if scene.is_split:
        assert after.contents == before.contents
    elif scene.is_reap:
        whole = [snapshot(path) for path in orphans(volume)]
        assert all(tree in before.trees for tree in whole)
    else:
        assert after.trees == before.trees
    if scene.is_gapless:
        assert after.head is not None
        assert after.head == before.head


def settle_without_loss(scene: CrashScenario, volume: Path, before: VolumeContents) -> None:
    """The law of most scenes: the name resolves already before any recovery, and nothing is lost after it."""
    if scene.is_gapless:
        assert home(volume).is_dir(), "the name does not resolve (I1)"
    settle(volume)
    assert_nothing_lost(scene, volume, before)


def end_of(body: Callable[[], object]) -> int:
    """The exit code of a child that runs `body`, after all its own children have ended too."""

    def guard() -> int:
        syscalls.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        code = code_of_child(body)
        try:
            while True:
                os.wait()
        except ChildProcessError:
            return code

    return call_in_child(guard, "a test")


def deaths(scene: CrashScenario, volume: Path, case: int = 0, n_cases: int = 1) -> Iterator[tuple[int, VolumeContents]]:
    """The volume after the act was killed before its n-th call, for every n that matters; the last time it was not.

    Args:
        case: one of `n_cases`, which share the calls.
    """
    scene.set_up(volume)
    *before_end, end_number = changing(scene.calls(volume))
    numbers = [*share_of(before_end, case, n_cases), end_number]
    for n in numbers:
        before = scene.set_up(volume)
        end = code_of_child if scene.by is None else end_of
        code = end(partial(scene.run, volume, DyingAt(n)))
        # Where root acts through a child of the owner, the child's death is root's error.
        assert code in (0, DyingAt.EXIT_CODE) or scene.by is not None, f"call {n}: exit code {code}"
        assert (code == 0) is (n == numbers[-1]) or scene.by is not None, f"call {n}: exit code {code}"
        yield n, before


def changing(calls: Sequence[NumberedCall]) -> list[int]:
    """The numbers of the calls before which to die, and of the end: between two of them nothing changes on disk.

    What is written into a file without a name goes with its process: until it is linked all deaths are alike.
    """
    names = {name for _, name in calls}
    assert names <= _CHANGING | LOOKING, f"what do they do: {names - _CHANGING - LOOKING}?"
    numbers, is_unnamed = [], False
    for number, name in calls:
        if name in _CHANGING:
            if not is_unnamed or name not in _OF_UNNAMED:
                numbers.append(number)
            is_unnamed = name == "tmpfile" or (is_unnamed and name in _OF_UNNAMED - {"link"})
    return [*numbers, 1 + max(number for number, _ in calls)]


class DyingAfter:
    """A hook that ends the process after the n-th (from 1) call of that name."""

    def __init__(self, call: str, n: int = 1) -> None:
        self.call = call
        self.left = n

    def __call__(self, call: str) -> None:
        if self.left == 0:
            end_process(DyingAt.EXIT_CODE)
        self.left -= call == self.call


class StoppingAt:
    """A hook that stops the process before its n-th call (from 0), until `go` can be read; `stopped` says so."""

    def __init__(self, n: int, stopped: int, go: int) -> None:
        self.left = n
        self.stopped = stopped
        self.go = go

    def __call__(self, _call: str) -> None:
        self.left -= 1
        if self.left == -1:
            os.write(self.stopped, b".")
            os.read(self.go, 1)


WON, LOST, BROKEN = 0, 10, 11


def outcome(act: Callable[[], object]) -> int:
    """How an act ended: it won, it lost with a clear error or a result that says so, or it broke."""
    try:
        result = act()
    except TrashdError as error:
        return LOST if error.message() else BROKEN
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        return BROKEN
    return LOST if getattr(result, "lost", None) else WON


def stop_meanwhile(scene: CrashScenario, volume: Path, n: int, meanwhile: Callable[[], T]) -> tuple[int, T]:
    """How the act ended, in a child that stops before its n-th call, if it makes so many; what `meanwhile` returned."""
    stopped, go = os.pipe(), os.pipe()

    def play() -> int:
        os.close(go[1])
        return outcome(lambda: scene.run(volume, StoppingAt(n, stopped[1], go[0])))

    with ThreadPoolExecutor(1) as thread:
        playing = thread.submit(call_in_child, play, "the act")
        playing.add_done_callback(lambda _playing: os.write(stopped[1], b"."))
        os.read(stopped[0], 1)
        try:
            result = meanwhile()
        finally:
            os.close(go[1])
    for fd in (*stopped, go[0]):
        os.close(fd)
    return playing.result(), result
