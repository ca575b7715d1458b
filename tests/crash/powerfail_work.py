"""Verbs whose power is cut: rounds that tell where their tree goes, and the law that every crash state keeps.

Round k has a tree at the name `v<k>`. Before a verb the round says by a mark which shapes it may leave
(`start k SHAPE`), and once the verb has promised it, which one is there for good (`durable k SHAPE`).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import NamedTuple, TypeVar

from fusefs.core.errors import TrashdError
from fusefs.core.record import RECORD_MAX_BYTES
from fusefs.linux.kernel import Gate, Kernel
from fusefs.store.layout import CACHEDIR_TEXT, decode_volume
from fusefs.store.stage import Options
from tests.support.logdisk import LoggedVolume
from tests.support.store import entries, init, problems, reap_now, recover_all, remove, restore, swap
from tests.support.users import as_user
from tests.support.volumes import btrfs_subvolume

T = TypeVar("T")

USER = 4711
MODE = 0o550  # of every tree and its fresh directory; its owner needs a loan to move it
STORE_DURABLE = "store durable"
CHANGES = frozenset(
    [
        "create",
        "tmpfile",
        "mkdir",
        "rmdir",
        "unlink",
        "rename",
        "renameat2",
        "exchange",
        "link",
        "write",
        "fallocate",
        "fsync",
        "chmod",
    ]
)
"""Calls before which a background flush makes a difference: between two that only look it makes none."""


class Shape(Enum):
    """Where a round's tree is."""

    HOME = "the tree at its name"
    SWAPPED = "fresh at the name, the tree in the store"
    REMOVED = "nothing at the name, the tree in the store"
    GAP = "the same, until recovery"
    AWAY = "fresh at the name, the tree elsewhere"
    WRITTEN = "something written into fresh, the tree in the store"
    RESCUED = "the tree at its name, what was written in the store"
    PARTED = "a part of the tree back in fresh, the rest in the store"
    REAPED = "fresh at the name, of the tree whatever is left"
    HALF = "fresh at the name, half of the tree in the store"
    HALF_HOME = "half of the tree at its name"


class Look(NamedTuple):
    """What is seen of a round: at its name, elsewhere, and in the store (which may be told in several ways)."""

    name: str
    elsewhere: str
    stored: tuple[tuple[str, ...], ...]


_ABSENT = "nothing"
_LOOKS = {
    Shape.HOME: Look("tree", _ABSENT, ((),)),
    Shape.SWAPPED: Look("fresh", _ABSENT, (("tree",),)),
    Shape.REMOVED: Look(_ABSENT, _ABSENT, (("tree",),)),
    Shape.GAP: Look(_ABSENT, _ABSENT, (("tree",),)),
    Shape.AWAY: Look("fresh", "tree", ((),)),
    Shape.WRITTEN: Look("late", _ABSENT, (("tree",),)),
    Shape.RESCUED: Look("tree", _ABSENT, (("late",),)),
    Shape.PARTED: Look("part", _ABSENT, (("rest",),)),
    Shape.REAPED: Look("fresh", _ABSENT, (("reaping",), ())),
    Shape.HALF: Look("fresh", _ABSENT, (("reaping",), ("half",))),
    Shape.HALF_HOME: Look("half", _ABSENT, ((),)),
}
_ORPHANS = ".trashd/u/*/orphans/*"
_KINDS = {
    (): "fresh",
    ("f0", "f1", "part"): "tree",
    ("f0", "f1"): "rest",
    ("f1", "part"): "half",
    ("late",): "late",
    ("part",): "part",
}


def _text(k: int, name: str) -> str:
    return f"{k} {name} " + "x" * 3000


def _read(path: Path) -> tuple[int | None, str]:
    """Which round a directory is of, None if it is empty, and what it is."""
    if not path.is_dir():
        return None, _ABSENT
    names = tuple(sorted(os.listdir(path)))
    kind = _KINDS.get(names, f"only {names}")
    rounds = set()
    for name in names:
        file = path / name / "p" if name == "part" else path / name
        text = file.read_text() if file.exists() else ""
        number = text.partition(" ")[0]
        if number.isdigit():
            rounds.add(int(number))
        if not number.isdigit() or text != _text(int(number), name):
            kind = "torn"
    return (rounds.pop() if len(rounds) == 1 else None), kind


class Meddler:
    """A gate: before the n-th call (from 0) that changes anything somebody flushes something; a full volume."""

    def __init__(self) -> None:
        self.flush: Callable[[], None] = lambda: None
        self.n_left = -1
        self.n_calls = 0
        self.n_in_a_round = 0
        self.is_full = False
        self.is_boundary = False

    def __call__(self, call: str) -> None:
        if call == "mkdir" and self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if call in ("exchange", "rename") and self.is_boundary:
            self.is_boundary = False
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        if call in CHANGES:
            self.n_calls += 1
            self.n_left -= 1
            if self.n_left == -1:
                self.flush()


class Cut:
    """A logged volume, what happens on it, and a kernel of the verb alone, with its gate."""

    def __init__(self, volume: LoggedVolume, scenario: Scenario, kind: type[Kernel] = Kernel) -> None:
        self.volume = volume
        self.uid = scenario.uid
        self.base = prepare(volume, scenario)
        self.meddler = Meddler()
        self.kernel = kind(self.meddler)

    def name(self, k: int) -> Path:
        return self.base / f"v{k}"

    def elsewhere(self, k: int) -> Path:
        return self.base / f"to{k}"

    def begin(self, k: int) -> None:
        """Make round k's tree; it is on the disk."""
        path = self.name(k)
        (path / "part").mkdir(parents=True)
        for name in ("f0", "f1", "part"):
            (path / name / "p" if name == "part" else path / name).write_text(_text(k, name))
        for directory in (path / "part", path):
            os.chown(directory, self.uid, self.uid)
        path.chmod(MODE)
        self.stands(k, Shape.HOME, sync=True)

    def flush_tree(self) -> None:
        """What a holder of any tree may do: fsync its directory, wherever that is now."""
        for pattern in ("v*", ".trashd/u/*/*/*/tree"):
            for path in self.base.glob(pattern):
                fd = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)

    def as_its_user(self, function: Callable[[], T]) -> T:
        """What a function returns that the trees' user runs; calls are counted as if they were ours."""
        result, self.meddler.n_calls, self.meddler.n_left = as_user(
            self.uid, lambda: (function(), self.meddler.n_calls, self.meddler.n_left)
        )
        return result

    def may(self, k: int, *shapes: Shape) -> None:
        for shape in shapes:
            self.volume.mark(f"start {k} {shape.name}")

    def stands(self, k: int, shape: Shape, *, sync: bool = False) -> None:
        """Say that a shape is there for good; sync makes it so, where no verb has promised it."""
        if sync:
            self.sync()
        self.volume.mark(f"durable {k} {shape.name}")

    def sync(self) -> None:
        """What anybody may do at any time: syncfs."""
        kernel = Kernel()
        with kernel.open_path(os.fsencode(self.base), os.O_RDONLY) as fd:
            kernel.syncfs(fd)

    def flush_unrelated(self) -> None:
        """What anybody may do too: write a new file beside the victim and fsync it."""
        fd = os.open(self.base / f"other{self.meddler.n_calls}", os.O_CREAT | os.O_WRONLY)
        try:
            os.write(fd, b"something")
            os.fsync(fd)
        finally:
            os.close(fd)

    def swapped(self, k: int, options: Options = Options()) -> str:  # noqa: B008  a value
        """Swap by the watched kernel, durable if the options say so; the id."""
        self.may(k, Shape.SWAPPED)
        done = swap(self.name(k), self.kernel, options)
        assert not done.warnings, done.warnings
        if options.durable:
            self.stands(k, Shape.SWAPPED)
        return done.id


class _Stopped(BaseException):
    """The end of a reaper in the middle of its work."""


def _stop_at(n: int, call: str) -> Gate:
    left = n

    def gate(name: str) -> None:
        nonlocal left
        left -= name == call
        if left < 0:
            raise _Stopped

    return gate


# ---- the rounds: each verb in its variants


def swap_round(cut: Cut, k: int) -> None:
    cut.begin(k)
    cut.swapped(k)


def swap_no_fsync_round(cut: Cut, k: int) -> None:
    cut.begin(k)
    cut.swapped(k, Options(durable=False))
    (cut.base / f"unrelated{k}").write_text("something that others do")
    cut.sync()
    cut.stands(k, Shape.SWAPPED)


def lower_store_round(cut: Cut, k: int) -> None:
    """A swap that the volume's store can't take: btrfs refuses by itself, for the others the gate does."""
    cut.begin(k)
    cut.meddler.is_boundary = cut.volume.fstype != "btrfs"
    cut.swapped(k)
    assert (cut.base / ".trashd").exists()


def two_rename_round(cut: Cut, k: int) -> None:
    cut.begin(k)
    cut.may(k, Shape.GAP)
    identifier = cut.swapped(k)
    cut.may(k, Shape.GAP, Shape.HOME)
    restore(cut.volume.mountpoint, identifier, cut.kernel)
    cut.stands(k, Shape.HOME)


def rm_round(cut: Cut, k: int) -> None:
    cut.begin(k)
    cut.may(k, Shape.REMOVED)
    remove(cut.name(k), cut.kernel)
    cut.stands(k, Shape.REMOVED)


def restore_removed_round(cut: Cut, k: int) -> None:
    cut.begin(k)
    cut.may(k, Shape.REMOVED)
    identifier = remove(cut.name(k), cut.kernel).id
    cut.stands(k, Shape.REMOVED, sync=True)
    cut.may(k, Shape.HOME)
    restore(cut.volume.mountpoint, identifier, cut.kernel)
    cut.stands(k, Shape.HOME)


def drop_round(cut: Cut, k: int) -> None:
    cut.begin(k)
    cut.may(k, Shape.REMOVED)
    cut.name(k).rename(cut.base / f".trashd/u/0/drop/v{k}")
    assert recover_all(cut.base, cut.kernel) == []
    cut.stands(k, Shape.REMOVED, sync=True)


def restore_round(cut: Cut, k: int) -> None:
    cut.begin(k)
    identifier = cut.swapped(k)
    cut.may(k, Shape.HOME)
    restore(cut.volume.mountpoint, identifier, cut.kernel)
    cut.stands(k, Shape.HOME)


def restore_elsewhere_round(cut: Cut, k: int) -> None:
    cut.begin(k)
    identifier = cut.swapped(k)
    cut.may(k, Shape.AWAY)
    restore(cut.base, identifier, cut.kernel, to=cut.elsewhere(k))
    cut.stands(k, Shape.AWAY)


def restore_over_written_round(cut: Cut, k: int) -> None:
    cut.begin(k)
    identifier = cut.swapped(k)
    late = cut.base / f"late{k}"
    late.write_text(_text(k, "late"))
    cut.sync()
    cut.may(k, Shape.WRITTEN)
    late.rename(cut.name(k) / "late")
    cut.stands(k, Shape.WRITTEN, sync=True)
    cut.may(k, Shape.RESCUED)
    assert restore(cut.base, identifier, cut.kernel).rescued
    cut.stands(k, Shape.RESCUED)


def restore_inside_round(cut: Cut, k: int) -> None:
    cut.begin(k)
    identifier = cut.swapped(k)
    cut.may(k, Shape.PARTED)
    restore(cut.base, identifier, cut.kernel, inside=b"part")
    cut.stands(k, Shape.PARTED)


def reap_round(cut: Cut, k: int) -> None:
    cut.begin(k)
    identifier = cut.swapped(k)
    cut.may(k, Shape.REAPED)
    assert reap_now(cut.base, identifier, cut.kernel).report.n_failed == 0


def restore_half_reaped_round(cut: Cut, k: int) -> None:
    cut.begin(k)
    identifier = cut.swapped(k)
    cut.may(k, Shape.REAPED)
    with suppress(_Stopped):
        reap_now(cut.base, identifier, Kernel(_stop_at(1, "unlink")))
    cut.stands(k, Shape.HALF, sync=True)
    cut.may(k, Shape.HALF_HOME)
    assert restore(cut.base, identifier, cut.kernel).partial
    cut.stands(k, Shape.HALF_HOME)


def reserve_round(cut: Cut, k: int) -> None:
    """A swap on a full volume, which makes no directory of its own; then the reserve is stocked again."""
    cut.begin(k)
    cut.meddler.is_full = True
    cut.swapped(k)
    cut.meddler.is_full = False
    assert not (cut.base / ".trashd/u/0/reserve/ready").exists()
    assert recover_all(cut.base, cut.kernel) == []


def user_round(cut: Cut, k: int) -> None:
    """A user's first swap makes his folder; each lends its owner write permission for the exchange."""
    cut.begin(k)
    cut.may(k, Shape.SWAPPED)
    identifier = cut.as_its_user(lambda: str(swap(cut.name(k), cut.kernel).id))
    cut.stands(k, Shape.SWAPPED)
    cut.may(k, Shape.HOME)
    cut.as_its_user(lambda: restore(cut.volume.mountpoint, identifier, cut.kernel).partial)
    cut.stands(k, Shape.HOME)


def lower_store_rm_round(cut: Cut, k: int) -> None:
    """A removal by a plain rename, which no filesystem hurries to the disk as it does an exchange."""
    cut.begin(k)
    cut.may(k, Shape.REMOVED)
    cut.meddler.is_boundary = cut.volume.fstype != "btrfs"
    remove(cut.name(k), cut.kernel)
    cut.stands(k, Shape.REMOVED)


def init_round(cut: Cut, _k: int) -> None:
    init(cut.base, cut.kernel)
    cut.volume.mark(STORE_DURABLE)


class Scenario(NamedTuple):
    """A round, and the volume that it needs.

    has_store  init has made it; False: the round does
    exchange   whether the store believes in RENAME_EXCHANGE
    boundary   the rounds are in a directory that no rename leads into, with a store of its own
    uid        whose trees they are
    repeats    whether a later round makes the same calls as the first
    """

    round: Callable[[Cut, int], None]
    n_rounds: int = 2
    has_store: bool = True
    exchange: bool = True
    boundary: bool = False
    uid: int = 0
    repeats: bool = True


SCENARIOS = {
    "swap": Scenario(swap_round),
    "swap --no-fsync": Scenario(swap_no_fsync_round),
    "swap in a lower store": Scenario(lower_store_round, boundary=True),
    "first swap": Scenario(swap_round, n_rounds=1, has_store=False, repeats=False),
    "rm in a lower store": Scenario(lower_store_rm_round, boundary=True),
    "swap by the reserve": Scenario(reserve_round),
    "swap by a user": Scenario(user_round, n_rounds=1, uid=USER),
    "two renames": Scenario(two_rename_round, exchange=False),
    "rm": Scenario(rm_round),
    "restore of removed": Scenario(restore_removed_round),
    "drop": Scenario(drop_round),
    "restore": Scenario(restore_round),
    "restore --to": Scenario(restore_elsewhere_round),
    "restore over written": Scenario(restore_over_written_round),
    "restore inside": Scenario(restore_inside_round),
    "restore of half": Scenario(restore_half_reaped_round, n_rounds=1),
    "reap": Scenario(reap_round),
    "init": Scenario(init_round, n_rounds=1, has_store=False, repeats=False),
}


def prepare(volume: LoggedVolume, scenario: Scenario) -> Path:
    """What must be on the volume before the first round; the directory that the rounds are in."""
    root = base = volume.mountpoint
    root.parent.chmod(0o711)  # others pass: some rounds are a user's
    root.chmod(0o1777)
    if scenario.has_store:
        init(root)
        if not scenario.exchange:
            path = root / ".trashd/volume.json"
            path.write_text(path.read_text().replace("true", "false"))
    if scenario.boundary:
        base = btrfs_subvolume(root, "lower") if volume.fstype == "btrfs" else root / "lower"
        if volume.fstype != "btrfs":
            base.mkdir()
    os.sync()
    if scenario.has_store:
        volume.mark(STORE_DURABLE)
    return base


# ---- the law


def allowed_shapes(marks: Sequence[str]) -> dict[int, set[Shape]]:
    """The shapes that each round may have, as the marks tell."""
    allowed: dict[int, set[Shape]] = {}
    for mark in marks:
        match mark.split():
            case ["start", k, shape]:
                allowed[int(k)].add(Shape[shape])
            case ["durable", k, shape]:
                allowed[int(k)] = {Shape[shape]}
    return allowed


def check_state(root: Path, marks: Sequence[str]) -> str | None:
    """What is wrong in a crash state: before recovery, after it, by the checker, or with the reaps left over."""
    allowed = allowed_shapes(marks)
    try:
        return (
            _check_shapes(root, allowed, "at once")
            or _repair(root, marks)
            or _check_shapes(root, {k: one - {Shape.GAP} for k, one in allowed.items()}, "after recovery")
            or _check_modes(root)
            or _check_list(root)
            or _finish_reaps(root)
        )
    except (OSError, TrashdError) as error:
        return f"recovery raised {error!r}"


def _repair(root: Path, marks: Sequence[str]) -> str | None:
    if not (root / ".trashd").exists():
        if STORE_DURABLE in marks:
            return "the store is gone"
        init(root)
    unfinished = [str(path) for path in (*root.glob(".trashd"), *root.glob("lower/.trashd")) if not _is_whole(path)]
    if unfinished:
        return f"half a store: {unfinished}"
    told = recover_all(root)
    return f"kept: {told}" if told else _silence(root)


def _is_whole(store: Path) -> bool:
    """Whether a store has what it appears with, by one rename, and its reserves the blocks that they are for."""
    files = {path.name: path.read_bytes() for path in store.iterdir() if path.is_file()}
    spares = [path.stat().st_blocks * 512 for path in store.glob("u/*/reserve/ready/spare")]
    return (
        (store / "u").is_dir()
        and decode_volume(files.get("volume.json", b"")) is not None
        and files.get("CACHEDIR.TAG") == CACHEDIR_TEXT
        and all(size >= RECORD_MAX_BYTES for size in spares)
    )


def _silence(root: Path) -> str | None:
    found = problems(root)
    if found == []:
        return None
    return f"the checker: {found}"


def _check_shapes(root: Path, allowed: dict[int, set[Shape]], when: str) -> str | None:
    stored = list(_stored(root))
    base = root / "lower" if (root / "lower").exists() else root
    for k, shapes in allowed.items():
        mine = tuple(sorted(kind for one, kind in stored if one == k))
        name, elsewhere = _read(base / f"v{k}")[1], _read(base / f"to{k}")[1]
        if not any((name, elsewhere) == _LOOKS[s][:2] and mine in _LOOKS[s].stored for s in shapes):
            told = ", ".join(sorted(shape.name for shape in shapes))
            return f"{when}: round {k} is {name} at its name, {elsewhere} elsewhere, {mine} stored; not {told}"
    return None


def _stored(root: Path) -> Iterator[tuple[int, str]]:
    """Round and kind of all that any store holds."""
    for pattern in (".trashd*/u/*/*/*/*", ".trashd*/u/*/drop/*"):
        for base in (root, root / "lower"):
            for path in base.glob(pattern):
                k, kind = (None, "") if not path.is_dir() or path.parent.parent.name == "drop" else _read_in(path)
                if k is not None:
                    yield k, kind


def _read_in(path: Path) -> tuple[int | None, str]:
    k, kind = _read(path)
    return k, "reaping" if path.parent.parent.name == "reaping" else kind


def _check_modes(root: Path) -> str | None:
    """A loan has ended on both sides by the time recovery has."""
    paths = [*root.glob("v*"), *root.glob("lower/v*"), *root.glob(f"{_ORPHANS}/tree")]
    wrong = [str(path.relative_to(root)) for path in paths if path.stat().st_mode & 0o7777 != MODE]
    return f"not its mode: {wrong}" if wrong else None


def _check_list(root: Path) -> str | None:
    """Whatever store has an orphan, a list of the volume's shows it with its origin: pointers lead there."""
    listed = {os.fsdecode(entry.path) for entry in entries(root) if not entry.problem}
    there = {str(path) for path in (*root.glob(_ORPHANS), *root.glob(f"lower/{_ORPHANS}"))}
    return None if there <= listed else f"not listed: {there - listed}"


def _finish_reaps(root: Path) -> str | None:
    """What a reaper had begun can be ended by the next one."""
    for entry in entries(root):
        if entry.state.value == "reaping":
            reaped = reap_now(root, entry.id)
            if reaped.lost or reaped.report.n_failed:
                return f"can't be reaped: {reaped}"
    left = [str(path) for path in root.glob(".trashd/u/*/reaping/*")]
    return f"left in reaping/: {left}" if left else _silence(root)
