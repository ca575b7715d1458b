"""What only looks: the checker and its repairs, the list, and the holders of a tree."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fusefs.cli.main import run
from fusefs.core.container_states import State
from fusefs.linux.kernel import Kernel
from tests.support.make_trees import make_tree
from tests.support.small_orphans import EXPIRED, TREE, command, orphan_in
from tests.support.store_verbs import (
    calls_of,
    place,
    problems,
    reap_now,
    recover_all,
    swap,
)

pytestmark = pytest.mark.needs("root")


def test_list_walks_no_tree(volume: Path) -> None:
    small = {"a": "1"}
    orphan_in(volume, spec=small)
    n_calls = len(calls_of(lambda kernel: _list(kernel, volume)))
    command(volume, "reap", "--all", "--now")
    orphan_in(volume, "large", spec={f"d{i}": {f"{j}": "" for j in range(9)} for i in range(50)})
    assert len(calls_of(lambda kernel: _list(kernel, volume))) == n_calls


def _list(kernel: Kernel, volume: Path) -> None:
    from fusefs.store.orphans import all_entries

    assert len(all_entries(kernel, [bytes(volume)])) == 1


@pytest.mark.parametrize("state", [State.STAGE, State.RESTORING, State.REAPING, State.ORPHANS])
def test_repair_removes_what_a_command_killed_after_its_record_left(volume: Path, state: State) -> None:
    container = place(volume, orphan_in(volume, options=EXPIRED).id)
    left = container.parents[1] / state.value / container.name
    reap_now(volume, container.name)
    left.mkdir(0o700)
    [problem] = problems(volume)
    assert problem == (str(left), "no record: left by a killed command", problem.hint)
    assert "--repair" in problem.hint
    assert recover_all(volume) == []
    assert not left.exists()


def test_a_container_without_a_record_that_holds_anything_is_kept(volume: Path) -> None:
    record = place(volume, orphan_in(volume).id) / "record.json"
    away = record.rename(volume / "away")
    [problem] = problems(volume)
    assert problem.what == "no record (I3)"
    assert "--repair" not in problem.hint
    recover_all(volume)
    away.rename(record)


def test_a_container_about_to_go_is_no_problem(volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the end of its record and its own a live command is not told from a killed one, but by a second look."""
    container = place(volume, orphan_in(volume, options=EXPIRED).id)
    reap_now(volume, container.name)
    left = container.parents[1] / "reaping" / container.name
    left.mkdir(0o700)
    monkeypatch.setattr(time, "sleep", lambda _seconds: left.rmdir())
    assert problems(volume) == []


# holders

_HOLD = """
import mmap, os, sys
kind, path = sys.argv[1:]
if kind == "fd":
    held = open(path + "/a")
elif kind == "cwd":
    os.chdir(path)
elif kind == "root":
    os.chroot(path)
elif kind == "map":
    with open(path + "/a", "rb") as file:
        held = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
print("ready", flush=True)
sys.stdin.read()
"""


def holder_of(kind: str, path: Path, *, in_namespace: bool = False) -> subprocess.Popen[bytes]:
    """A process that holds something in a tree, ready when this returns, and ended by the end of its stdin."""
    argv = [sys.executable, "-c", _HOLD, kind, str(path)]
    if kind == "exe":
        argv = [str(path / "cat")]
    if in_namespace:
        argv = ["unshare", "--mount", *argv]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    if kind == "exe":
        process.stdin.write(b"ready\n")
        process.stdin.flush()
    assert process.stdout.readline() == b"ready\n"
    return process


@pytest.mark.parametrize(
    ("kind", "in_namespace"),
    [("fd", False), ("cwd", False), ("root", False), ("map", False), ("exe", False), ("fd", True), ("cwd", True)],
)
def test_holder_is_found_before_and_after_a_swap(
    volume: Path, kind: str, in_namespace: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_tree(volume / "job", TREE)
    subprocess.run(["cp", "/bin/cat", job], check=True)
    process = holder_of(kind, job, in_namespace=in_namespace)
    with process:
        assert run(["holders", "--json", str(job)]) == 0
        before = json.loads(capsys.readouterr().out)["holders"]
        swapped = swap(job)
        assert command(volume, "holders", "--json", swapped.id) == 0
        after = json.loads(capsys.readouterr().out)["holders"]
        assert run(["holders", "--json", str(job)]) == 0
        assert json.loads(capsys.readouterr().out)["holders"] == []
    assert {(holder["pid"], holder["kind"]) for holder in before} >= {(process.pid, kind)}
    assert {*map(str, after)} == {*map(str, before)}
