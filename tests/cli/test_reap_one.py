"""`trashd reap --one`, as an array of a scheduler's tasks runs it: they share a volume by claims alone.

What is reaped has expired: `--all --now` would take the orphans of a store above the test's volume, too.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.support.make_trees import IMMUTABLE, make_tree, set_flags
from tests.support.many_files import fill
from tests.support.trashd_command import TRASHD, done_well, environment, swapped, trashd

pytestmark = pytest.mark.needs("root")

N_TASKS, N_ORPHANS = 8, 20


def expired(tree: Path) -> str:
    """The id of an orphan that may go."""
    return str(swapped(tree, "--keep-for", "0s")["id"])


def small(volume: Path, name: str) -> str:
    return expired(make_tree(volume / name, {"file": "", "below": {"deep": ""}}))


def states(volume: Path) -> dict[str, str]:
    """What is in which state's directory."""
    found = (volume / ".trashd/u/0").glob("*ing/*"), (volume / ".trashd/u/0/orphans").iterdir()
    return {one.name: one.parent.name for some in found for one in some}


def start_task(volume: Path) -> subprocess.Popen[str]:
    words = (TRASHD, "reap", "--one", "--json", "--volume", str(volume))
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment({}))


def test_tasks_that_run_at_once_reap_every_orphan_exactly_once(volume: Path) -> None:
    orphans = {expired(fill(volume / f"job{n}", 300)) for n in range(N_ORPHANS)}
    reaped = Counter[str]()
    for _ in range(N_ORPHANS):
        tasks = [start_task(volume) for _ in range(N_TASKS)]
        ended = [(*task.communicate(), task.returncode) for task in tasks]
        assert [(err, code) for _out, err, code in ended if err or code] == []
        told = [out for out, _err, _code in ended if out]
        reaped.update(identifier for identifier in orphans for out in told if identifier in out)
        if not told:
            break
    assert reaped == dict.fromkeys(orphans, 1)
    assert states(volume) == {}


@pytest.mark.quick("reap")
def test_one_is_reaped_and_the_oldest(volume: Path) -> None:
    first, second = small(volume, "a"), small(volume, "b")
    done = done_well("reap", "--one", "--volume", volume)
    assert done.out == f"{first}: 4 entries removed\n"
    assert states(volume) == {second: "orphans"}


def test_with_nothing_left_it_has_done_what_it_should_and_says_so(volume: Path) -> None:
    done = done_well("reap", "--one", "--volume", volume)
    assert (done.out, done.err) == ("", "no orphan has expired\n")


def test_what_fails_is_one_too_and_the_next_task_takes_another(volume: Path) -> None:
    stuck, other = small(volume, "a"), small(volume, "b")
    set_flags(volume / f".trashd/u/0/orphans/{stuck}/tree/file", IMMUTABLE)
    assert trashd("reap", "--one", "--volume", volume).code == 13
    done = done_well("reap", "--one", "--volume", volume)
    assert done.out.startswith(f"{other}: ")
    done_well("reap", "--force", "--yes", "--volume", volume, stuck)
