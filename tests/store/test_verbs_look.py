"""What only looks: list, check, doctor and holders."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from fusefs.cli.main import run
from fusefs.core.container_states import State
from fusefs.core.errors import Refused
from fusefs.linux.kernel import Kernel
from fusefs.store.stage import SwapOptions
from tests.support.make_trees import make_tree, snapshot
from tests.support.real_filesystems import tmpfs_volume
from tests.support.small_orphans import EXPIRED, OTHER, TREE, command, orphan_in, orphan_of
from tests.support.store_verbs import (
    ActingBefore,
    calls_of,
    die,
    in_child,
    place,
    problems,
    reap_now,
    recover_all,
    swap,
)

pytestmark = pytest.mark.needs("root")


def test_list_shows_origin_age_retention_owner_and_state(volume: Path, capsys: pytest.CaptureFixture[str]) -> None:
    swapped = orphan_of(OTHER, volume, SwapOptions(3600, "why"))
    assert command(volume, "list", "--json") == 0
    (fields,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (fields["id"], fields["origin"]) == (swapped.id, os.fsdecode(swapped.path))
    assert (fields["uid"], fields["state"], fields["note"]) == (OTHER, "orphans", "why")
    assert 0 < fields["restorable_for_s"] <= 3600
    assert command(volume, "list") == 0
    shown = capsys.readouterr().out.splitlines()[1]
    assert all(part in shown for part in (swapped.id[-12:], str(OTHER), "restorable", os.fsdecode(swapped.path)))


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


def test_check_touches_nothing(volume: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tree(volume / "job", TREE)
    before = snapshot(volume, with_times=True)
    assert run(["check", "--json", str(volume / "job")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert snapshot(volume, with_times=True) == before
    assert (found["method"], found["exists"], found["filesystem"]) == ("exchange", True, "tmpfs")
    assert (found["store"], found["refusals"], found["n_holders"]) == (str(volume / ".trashd"), [], 0)


def test_check_makes_no_store(capsys: pytest.CaptureFixture[str]) -> None:
    with tmpfs_volume() as path:
        make_tree(path / "job", TREE)
        assert run(["swap", "--dry-run", str(path / "job")]) == 0
        assert "would be made" in capsys.readouterr().out
        assert os.listdir(path) == ["job"]


def test_check_names_what_stands_against_a_swap(volume: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (volume / "file").touch()
    assert run(["check", str(volume / "file")]) == Refused.exit_code
    assert "Not a directory" in capsys.readouterr().out


def test_doctor_is_silent_only_if_all_is_well(volume: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = make_tree(volume / "job", TREE)
    assert run(["doctor", str(volume)]) == 0
    assert capsys.readouterr().out == ""
    in_child(partial(swap, job, Kernel(ActingBefore("exchange", die))))
    assert run(["doctor", str(volume)]) == 1
    assert "left by a killed command" in capsys.readouterr().out
    assert run(["doctor", "--repair", str(volume)]) == 0


def test_doctor_keeps_and_names_what_it_does_not_understand(volume: Path) -> None:
    junk = volume / ".trashd/u/0/orphans/junk"
    junk.write_text("x")
    recover_all(volume)
    assert [problem.what for problem in problems(volume)] == ["not a container of trashd"]
    assert junk.read_text() == "x"
    junk.unlink()


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
