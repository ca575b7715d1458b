"""Power cut while something leaves the store by a person's word: taken out, given up, or deleted with stores in it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from fusefs.core.errors import TrashdError
from fusefs.linux.kernel import Kernel
from fusefs.store.rescue import find_thing, forget, rescue
from tests.crash.powerfail_work import Cut, Scenario
from tests.support.make_trees import make_tree
from tests.support.nested_stores import reap_with_stores, store_in
from tests.support.small_orphans import EXPIRED, PINNED
from tests.support.store_calls import entries, problems, raw, reap_now, recover_all, swap

PREPARED = "it is there to be taken out"
DONE = "done"
TEXT = "all of it " * 300
_CUT = 40
"""What of its record is left."""


def _broken(cut: Cut) -> None:
    """An orphan that can't be understood."""
    make_tree(cut.base / "job", {"file": TEXT, "sub": {"file": TEXT}})
    identifier = swap(cut.base / "job").id
    os.truncate(cut.base / f".trashd/u/0/orphans/{identifier}/record.json", _CUT)
    cut.sync()
    cut.volume.mark(PREPARED)


def _take_out(base: Path, kernel: Kernel) -> None:
    rescue(kernel, [raw(base)], find_thing(kernel, [raw(base)], raw(_name_of(base))), raw(base / "out"))


def _give_up(base: Path, kernel: Kernel) -> None:
    forget(kernel, [raw(base)], find_thing(kernel, [raw(base)], raw(_name_of(base))))


def _name_of(base: Path) -> Path:
    (path,) = base.glob(".trashd/u/0/orphans/*-job-*")
    return Path(path.name)


def rescue_round(cut: Cut, _k: int) -> None:
    """`doctor --rescue`."""
    _broken(cut)
    _take_out(cut.base, cut.kernel)
    cut.volume.mark(DONE)


def forget_round(cut: Cut, _k: int) -> None:
    """`doctor --forget`."""
    _broken(cut)
    _give_up(cut.base, cut.kernel)
    cut.volume.mark(DONE)


def check_rescued(root: Path, marks: Sequence[str]) -> str | None:
    """It is whole, in one place; not taken out yet, it can be."""
    return _check_stuck(root, is_out=DONE in marks)


def check_forgotten(root: Path, _marks: Sequence[str]) -> str | None:
    """What is given up is whole, in one place; then it is an orphan like others, and is reaped."""
    return _check_stuck(root, is_out=None)


def _check_stuck(root: Path, *, is_out: bool | None) -> str | None:
    try:
        if is_out and not (root / "out").exists():
            return "it was said to be out"
        if found := _not_once(root, "at once"):
            return found
        recover_all(root)
        if found := _not_once(root, "after recovery"):
            return found
        if is_out is None:
            if not list(root.glob(".trashd/u/0/orphans/*/tree/tree")):
                _give_up(root, Kernel())
            if found := _not_once(root, "given up"):
                return found
            (entry,) = entries(root)
            if reap_now(root, entry.id).report.n_failed:
                return "it can't be reaped"
        elif not (root / "out").exists():
            _take_out(root, Kernel())
        told = problems(root)
    except (OSError, TrashdError, ValueError) as error:
        return f"recovery raised {error!r}"
    return f"the checker: {told}" if told else None


def _not_once(root: Path, when: str) -> str | None:
    """Whether it is not in exactly one place, with what is left of its record."""
    places = [path for path in root.rglob("tree") if (path / "sub").is_dir()]
    if len(places) != 1:
        return f"{when}: it is at {places}"
    (tree,) = places
    if [(tree / name).read_text() for name in ("file", "sub/file")] != [TEXT, TEXT]:
        return f"{when}: it is not whole"
    size = (tree.parent / "record.json").stat().st_size
    return None if size == _CUT else f"{when}: its record has {size} bytes"


def reap_with_stores_round(cut: Cut, _k: int) -> None:
    """`reap --with-stores` of a tree in which one store holds what is pinned, and one what is not."""
    team = make_tree(cut.base / "team", {"a": TEXT, "kept": {}, "given": {"sub": {"file": TEXT}}})
    store_in(cut.base, team / "kept", PINNED)
    store_in(cut.base, team / "given", EXPIRED)
    identifier = swap(team).id
    assert reap_now(cut.base, identifier).report.n_failed == 2
    cut.sync()
    cut.volume.mark(PREPARED)
    assert reap_with_stores(cut.base, identifier, cut.kernel).report.n_failed == 1
    cut.volume.mark(DONE)


def check_with_stores(root: Path, _marks: Sequence[str]) -> str | None:
    """What is pinned is whole; what a killed reap left the next one ends."""
    try:
        recover_all(root)
        if found := _not_pinned(root, "after recovery"):
            return found
        (entry,) = [one for one in entries(root) if b"/.trashd/u/0/" in one.path and b"/tree/" not in one.path]
        if reap_with_stores(root, entry.id).report.n_failed != 1:
            return "more is left than what is pinned, or less"
        told = problems(root)
        return _not_pinned(root, "in the end") or (f"the checker: {told}" if told else None)
    except (OSError, TrashdError, ValueError) as error:
        return f"recovery raised {error!r}"


def _not_pinned(root: Path, when: str) -> str | None:
    found = [(path / "a").read_text() for path in root.glob(".trashd/u/0/*/*/tree/kept/.trashd/u/0/orphans/*/tree")]
    return None if found == ["1"] else f"{when}: what is pinned is {found}"


STUCK = {
    "doctor --rescue": Scenario(rescue_round, 1, check=check_rescued, since=PREPARED),
    "doctor --forget": Scenario(forget_round, 1, check=check_forgotten, since=PREPARED),
    "reap --with-stores": Scenario(reap_with_stores_round, 1, check=check_with_stores, since=PREPARED),
}
