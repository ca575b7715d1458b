"""What every crash state must be: each round in one of the shapes that its marks allow, before and after recovery.

Round k has a tree at the name `v<k>`. Before a verb the round says by a mark which shapes it may leave
(`start k SHAPE`), and once the verb has promised it, which one is there for good (`durable k SHAPE`).
"""

import os
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from fusefs.core.errors import TrashdError
from fusefs.core.record import RECORD_MAX_BYTES
from fusefs.store.layout import CACHEDIR_TEXT, decode_volume
from fusefs.store.orphans import ListedContainer
from tests.support.other_users import query_without_fork
from tests.support.store_verbs import entries, init, problems, reap_now, recover_all
from tests.support.user_homes import forget_stores

MODE = 0o550  # of every tree and its fresh directory; its owner needs a loan to move it
ENTERED = 0o700  # of a directory in root's orphan once a reaper is in it, so that no user brings anything in
STORE_DURABLE = "store durable"


class Shape(Enum):
    """Where a round's tree is."""

    HOME = "the tree at its name"
    SWAPPED = "fresh at the name, the tree in the store"
    REMOVED = "nothing at the name, the tree in the store"
    GAP = "the same, until recovery"
    TAKEN = "fresh at the name, the tree and its record in an orphan of root's"
    AWAY = "fresh at the name, the tree elsewhere"
    WRITTEN = "something written into fresh, the tree in the store"
    RESCUED = "the tree at its name, what was written in the store"
    PARTED = "a part of the tree back in fresh, the rest in the store"
    FILE_PARTED = "the same of a file in it"
    REAPED = "fresh at the name, of the tree whatever is left"
    HALF = "fresh at the name, half of the tree in the store"
    HALF_HOME = "half of the tree at its name"
    LINKED = "the tree at its name, a link of what it shall keep in the store, until recovery"
    SHOWN = "what is kept by a link at the name, the tree in the store, until recovery"
    KEPT = "what is kept at the name, the rest of the tree in the store"
    SWEEPING = "a file of the tree in the store, the rest at its name"
    SWEPT = "a file and a part of the tree in the store, the rest at its name"
    MERGING = "a part of the tree in the store, the rest at its name"
    PARTING = "the rest of the tree at its name, what was kept in the store, until recovery"


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
    Shape.TAKEN: Look("fresh", _ABSENT, (("taken",),)),
    Shape.AWAY: Look("fresh", "tree", ((),)),
    Shape.WRITTEN: Look("late", _ABSENT, (("tree",),)),
    Shape.RESCUED: Look("tree", _ABSENT, (("late",),)),
    Shape.PARTED: Look("part", _ABSENT, (("rest",),)),
    Shape.FILE_PARTED: Look("file", _ABSENT, (("half",),)),
    Shape.REAPED: Look("fresh", _ABSENT, (("reaping",), ())),
    Shape.HALF: Look("fresh", _ABSENT, (("reaping",), ("half",))),
    Shape.HALF_HOME: Look("half", _ABSENT, ((),)),
    Shape.LINKED: Look("tree", _ABSENT, (("file",),)),
    Shape.SHOWN: Look("file", _ABSENT, (("tree",),)),
    Shape.KEPT: Look("kept", _ABSENT, (("rest",),)),
    Shape.SWEEPING: Look("half", _ABSENT, (("file",),)),
    Shape.SWEPT: Look("lone", _ABSENT, (("kept",),)),
    Shape.MERGING: Look("rest", _ABSENT, (("part",),)),
    Shape.PARTING: Look("rest", _ABSENT, (("kept",),)),
}
_PASSING = {Shape.GAP, Shape.LINKED, Shape.SHOWN, Shape.PARTING}
_ORPHANS = ".trashd/*/*/orphans/*"  # in `u/`, or in `new/`, where users make their folders
_STORED = (
    ".trashd*/*/*/*/*/*",
    ".trashd*/old-*/*/*/*/*/*",  # in a store that root set aside
    ".trashd*/*/*/*/*/tree/tree",
    ".trashd*/*/*/drop/*",
)
_SPARES = ".trashd/*/*/reserve/ready/spare"
_KINDS = {
    (): "fresh",
    ("f0", "f1", "part"): "tree",
    ("f0", "f1"): "rest",
    ("f1", "part"): "half",
    ("f0", "part"): "kept",
    ("late",): "late",
    ("part",): "part",
    ("f0",): "file",
    ("f1",): "lone",
}


def text_of(k: int, name: str) -> str:
    """What is in the file of that name in round k's tree; that of `part` is in it."""
    return f"{k} {name} " + "x" * 3000


def _read(path: Path) -> tuple[int | None, str]:
    """Which round a directory is of, None if it is empty, and what it is; a file of the right text is a tree too."""
    if path.is_file():
        text = path.read_text()
        number = text.partition(" ")[0]
        whole = number.isdigit() and text == text_of(int(number), "file")
        return (int(number) if number.isdigit() else None), "tree" if whole else "torn"
    if not path.is_dir():
        return None, _ABSENT
    names = tuple(sorted(os.listdir(path)))
    kind = _KINDS.get(names, f"only {names}")
    rounds = set()
    for name in names:
        file = path / name / "p" if name == "part" else path / name
        text = file.read_text() if file.is_file() else ""
        number = text.partition(" ")[0]
        if number.isdigit():
            rounds.add(int(number))
        if not number.isdigit() or text != text_of(int(number), name):
            kind = "torn"
    return (rounds.pop() if len(rounds) == 1 else None), kind


def allowed_shapes(marks: Sequence[str]) -> dict[int, set[Shape]]:
    allowed: dict[int, set[Shape]] = {}
    for mark in marks:
        match mark.split():
            case ["start", k, shape]:
                allowed[int(k)].add(Shape[shape])
            case ["durable", k, shape]:
                allowed[int(k)] = {Shape[shape]}
    return allowed


@query_without_fork()
def check_state(root: Path, marks: Sequence[str]) -> str | None:
    """What is wrong in a crash state: before recovery, after it, by the checker, or with the reaps left over."""
    allowed = allowed_shapes(marks)
    try:
        return (
            _check_shapes(root, allowed, "at once")
            or _repair(root, marks)
            or _check_shapes(root, {k: one - _PASSING for k, one in allowed.items()}, "after recovery")
            or _check_modes(root, allowed)
            or _check_reserves(root)
            or _check_listed(root, entries(root), marks)
        )
    except (OSError, TrashdError) as error:
        return f"recovery raised {error!r}"


def shapes_at_once(root: Path, marks: Sequence[str]) -> str | None:
    return _check_shapes(root, allowed_shapes(marks), "at once")


def _repair(root: Path, marks: Sequence[str]) -> str | None:
    if not (root / ".trashd").exists():
        if STORE_DURABLE in marks:
            return "the store is gone"
        forget_stores()  # those of other states: each would be looked for
        init(root)
    unfinished = [str(path) for path in (*root.glob(".trashd"), *root.glob("lower/.trashd")) if not _is_whole(path)]
    if unfinished:
        return f"half a store: {unfinished}"
    told = recover_all(root)
    return f"kept: {told}" if told else _silence(root)


def _is_whole(store: Path) -> bool:
    """Whether a store has what it appears with, by one rename."""
    files = {path.name: path.read_bytes() for path in store.iterdir() if path.is_file()}
    return (
        all((store / area).is_dir() for area in ("u", "new", "folders"))
        and decode_volume(files.get("volume.json", b""), b"") is not None
        and files.get("CACHEDIR.TAG") == CACHEDIR_TEXT
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
            text = ", ".join(sorted(shape.name for shape in shapes))
            return f"{when}: round {k} is {name} at its name, {elsewhere} elsewhere, {mine} stored; not {text}"
    return None


def _stored(root: Path) -> Iterator[tuple[int, str]]:
    """Round and kind of all that any store holds."""
    for pattern in _STORED:
        for base in (root, root / "lower"):
            for path in base.glob(pattern):
                is_inside = path.parent.parent.name == "drop" or path.name not in ("tree", "fresh", f"v{path.name[1:]}")
                k, kind = (None, "") if is_inside else _read_in(path)
                if k is not None:
                    yield k, kind


def _read_in(path: Path) -> tuple[int | None, str]:
    k, kind = _read(path)
    if path.parent.name == "tree":
        return k, "taken" if kind == "tree" and path.with_name("record.json").exists() else kind
    return k, "reaping" if path.parent.parent.name == "reaping" else kind


def _check_modes(root: Path, allowed: dict[int, set[Shape]]) -> str | None:
    """A loan has ended on both sides by the time recovery has; what root's reaper entered stays root's alone."""
    halves = {root / f"v{k}" for k, shapes in allowed.items() if Shape.HALF_HOME in shapes}
    paths = [*root.glob("v*"), *root.glob("lower/v*"), *root.glob(f"{_ORPHANS}/tree")]
    paths = [path for path in paths if path.is_dir() and not (path / "record.json").exists()]
    modes = {path: ENTERED if path in halves and _read(path)[1] == "half" else MODE for path in paths}
    wrong = [str(path.relative_to(root)) for path, mode in modes.items() if path.stat().st_mode & 0o7777 != mode]
    return f"not its mode: {wrong}" if wrong else None


def _check_listed(root: Path, listed: Sequence[ListedContainer], marks: Sequence[str]) -> str | None:
    """What is wrong with a list of the volume's, or with the reaps that it shows; a list costs a child of each user."""
    return _check_list(root, listed) or _check_pins(listed, marks) or _finish_reaps(root, listed)


def _check_list(root: Path, listed: Sequence[ListedContainer]) -> str | None:
    """Whatever store has an orphan, a list of the volume's shows it with its origin: pointers lead there."""
    shown = {os.fsdecode(entry.path) for entry in listed if not entry.problem}
    there = {str(path) for path in (*root.glob(_ORPHANS), *root.glob(f"lower/{_ORPHANS}"))}
    return None if there <= shown else f"not listed: {there - shown}"


def _check_pins(listed: Sequence[ListedContainer], marks: Sequence[str]) -> str | None:
    pinned = {int(mark.split()[1]) for mark in marks if mark.startswith("pinned ")}
    for entry in listed:
        k, _kind = _read(Path(os.fsdecode(entry.path), "tree"))
        if k in pinned and entry.expires_ns is not None:
            return f"round {k} is not pinned any more"
    return None


def _check_reserves(root: Path) -> str | None:
    """A reserve has the blocks that it is for."""
    poor = [str(path) for path in root.glob(_SPARES) if path.stat().st_blocks * 512 < RECORD_MAX_BYTES]
    return f"without blocks: {poor}" if poor else None


def _finish_reaps(root: Path, listed: Sequence[ListedContainer]) -> str | None:
    """What a reaper had begun can be ended by the next one."""
    begun = [entry.id for entry in listed if entry.state.value == "reaping"]
    for identifier in begun:
        reaped = reap_now(root, identifier)
        if reaped.lost or reaped.report.n_failed:
            return f"can't be reaped: {reaped}"
    left = [str(path) for path in root.glob(".trashd/*/*/reaping/*")]
    if left:
        return f"left in reaping/: {left}"
    return _silence(root) if begun else None
