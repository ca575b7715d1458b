"""Victims and orphans with little in them, and the commands on them, for tests of single laws."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from fusefs.cli.main import run
from fusefs.store.stage import SwapOptions
from fusefs.store.swap import Swapped
from tests.support.make_trees import Dir, Spec, Symlink, make_tree
from tests.support.other_users import as_user
from tests.support.store_verbs import entries, swap

OTHER = 12001
"""A user that the system does not know."""
TREE: Spec = {"a": "1", "sub": {"b": "2", "link": Symlink("../a")}}
EXPIRED = SwapOptions(retention_s=0)
PINNED = SwapOptions(retention_s=None)


def victim_in(volume: Path, name: str = "job") -> Path:
    return make_tree(volume / name, TREE)


def orphan_in(volume: Path, name: str = "job", options: SwapOptions | None = None, spec: Spec = TREE) -> Swapped:
    return swap(make_tree(volume / name, spec), options=options or SwapOptions())


def orphan_of(uid: int, volume: Path, options: SwapOptions) -> Swapped:
    make_tree(volume / f"home-{uid}", Dir({"job": Dir({"a": "1"}, owner=(uid, uid))}, owner=(uid, uid)))
    return as_user(uid, partial(swap, volume / f"home-{uid}/job", None, options))


def command(volume: Path, verb: str, *arguments: str) -> int:
    """The exit code of a command that is told the volume."""
    return run([verb, *arguments, "--volume", str(volume)])


def ids(volume: Path) -> set[str]:
    return {entry.id for entry in entries(volume)}
