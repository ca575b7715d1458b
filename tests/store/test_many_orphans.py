"""What many orphans and many planted names cost: so many calls for each, counted over all processes, and none twice."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fusefs.core.names import make_id
from fusefs.linux.kernel import Kernel
from fusefs.store.orphans import all_entries, tend_all
from tests.support.make_trees import Dir, make_tree
from tests.support.other_users import as_user
from tests.support.real_filesystems import tmpfs_volume
from tests.support.small_orphans import EXPIRED
from tests.support.store_verbs import folder_of, forge, init, numbered_calls, raw, swap

pytestmark = pytest.mark.needs("root")

ALICE, BOB = 1001, 1002
LOOK: dict[str, Callable[[Kernel, list[bytes]], object]] = {"list": all_entries, "tend": tend_all}


@pytest.fixture
def volume() -> Iterator[Path]:
    """A store of root's with an orphan of Alice's, and room."""
    with tmpfs_volume("256m", ("nr_inodes=0",)) as path:
        init(path)
        make_tree(path / "alice", Dir({"job": Dir({"a": "1"}, owner=(ALICE, ALICE))}, owner=(ALICE, ALICE)))
        as_user(ALICE, lambda: swap(path / "alice/job", options=EXPIRED))
        yield path


def calls(volume: Path, look: Callable[[Kernel, list[bytes]], object]) -> int:
    """How many calls a look makes, those of root's children included: each counts on from where it was forked."""
    return max(call.number for call in numbered_calls(lambda kernel: look(kernel, [raw(volume)])))


def add_orphans(volume: Path, n: int, start: int) -> None:
    """More orphans of Alice's like the one that is there."""
    orphans = folder_of(volume, ALICE) / "orphans"
    first = next(orphans.iterdir())

    def act() -> None:
        for i in range(start, start + n):
            identifier = make_id("20250101T000000", i % 1000, b"job", i.to_bytes(6, "big"))
            shutil.copytree(first, orphans / identifier)
            forge(orphans / identifier / "record.json", id=identifier)

    as_user(ALICE, act)


@pytest.mark.parametrize("name", LOOK)
def test_each_orphan_costs_a_look_as_many_calls_as_the_one_before(volume: Path, name: str) -> None:
    calls(volume, LOOK[name])  # her folder is registered by the first one
    counts = []
    for n, start in ((0, 0), (150, 0), (150, 150)):
        add_orphans(volume, n, start)
        counts.append(calls(volume, LOOK[name]))
    none, some, twice = counts
    assert twice - some <= some - none + 20
    assert some - none <= 8 * 150


def plant(volume: Path, n: int, start: int, names: Callable[[int], str]) -> None:
    """Names that may be users' folders, and are none."""
    area = next(path for path in (volume / ".trashd/new", volume / ".trashd/u") if path.exists())

    def act() -> None:
        for i in range(start, start + n):
            (area / names(i)).mkdir()

    as_user(BOB, act)


OF_ONE: Callable[[int], str] = f"{ALICE}.{{:012x}}".format
OF_MANY: Callable[[int], str] = lambda i: str(20_000 + i)  # noqa: E731


@pytest.mark.parametrize("names", [OF_ONE, OF_MANY], ids=["one-user", "many-users"])
@pytest.mark.parametrize("name", LOOK)
def test_ten_thousand_planted_names_cost_no_process_and_a_few_calls_each(
    volume: Path, name: str, names: Callable[[int], str]
) -> None:
    calls(volume, LOOK[name])  # her folder is registered by the first one
    none = calls(volume, LOOK[name])
    plant(volume, 10_000, 0, names)
    entries_before = os.listdir(volume / ".trashd")
    assert calls(volume, LOOK[name]) - none <= 8 * 10_000
    assert os.listdir(volume / ".trashd") == entries_before
