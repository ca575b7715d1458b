"""Orphans: their term, the checker and its repairs, the list, the holders of a tree, and a look inside."""

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from fusefs.cli.main import run
from fusefs.core.container_states import DEFAULT_RETENTION_S, State
from fusefs.core.errors import Busy, NotFound, Refused
from fusefs.core.human_units import DURATION_MAX_S
from fusefs.core.orphan_age import start_clock
from fusefs.core.policy import KnownOrphan, RetentionRules, due_in_s
from fusefs.core.record import Record
from fusefs.core.record_decoding import decode_record
from fusefs.linux.disk_usage import may_be_archived
from fusefs.linux.kernel import Kernel
from fusefs.linux.machine_identity import read_now
from fusefs.store.orphan_contents import Difference, content_of, find_differences
from fusefs.store.orphans import (
    DefaultRetention,
    NewRetention,
    PinnedOrphan,
    RetentionFromNow,
    change_retention,
    find_container,
)
from fusefs.store.stage import SwapOptions
from tests.support.make_trees import make_tree, snapshot
from tests.support.shared_memory_children import code_of_child
from tests.support.small_orphans import EXPIRED, OTHER, TREE, command, orphan_in, orphan_of
from tests.support.store_verbs import (
    DyingAt,
    calls_of,
    entries,
    place,
    problems,
    reap_now,
    recover_all,
    restore,
    swap,
)

pytestmark = pytest.mark.needs("root")


S = 1_000_000_000
PINNED: NewRetention = RetentionFromNow(None)


def record_in(volume: Path, identifier: str) -> Record:
    return decode_record((place(volume, identifier) / "record.json").read_bytes())


def keep(volume: Path, identifier: str, term: NewRetention = PINNED, kernel: Kernel | None = None) -> PinnedOrphan:
    kernel = kernel or Kernel()
    return change_retention(kernel, [bytes(volume)], find_container(kernel, [bytes(volume)], identifier), term)


def test_only_the_record_changes_and_only_its_term(volume: Path) -> None:
    identifier = orphan_in(volume, options=SwapOptions(note="a note")).id
    tree = place(volume, identifier) / "tree"
    before, record = snapshot(tree, with_times=True), record_in(volume, identifier)
    keep(volume, identifier)
    assert snapshot(tree, with_times=True) == before
    assert record_in(volume, identifier) == record._replace(retention_s=None)


def test_kept_for_a_time_it_is_due_so_long_from_now(volume: Path) -> None:
    identifier = orphan_in(volume, options=SwapOptions(retention_s=1)).id
    before_ns = time.time_ns()
    kept = keep(volume, identifier, RetentionFromNow(3600))
    assert kept.expires_ns is not None
    assert before_ns + 3599 * S <= kept.expires_ns <= time.time_ns() + 3602 * S


def test_kept_for_just_the_usual_term_is_not_taken_for_nothing_asked(volume: Path) -> None:
    identifier = orphan_in(volume).id
    record = record_in(volume, identifier)
    created_ns = record.created_ns

    class Frozen(Kernel):
        def now_ns(self) -> int:
            return created_ns

        def boot_ns(self) -> int:
            return record.boot_ns or 0

    kept = keep(volume, identifier, RetentionFromNow(DEFAULT_RETENTION_S), Frozen())
    due_s = due_in_s(
        KnownOrphan(identifier, created_ns, kept.retention_s),
        RetentionRules(retention_s=600),
        start_clock(created_ns, 0),
    )
    assert due_s is not None
    assert due_s > DEFAULT_RETENTION_S - 600


@pytest.mark.parametrize("ahead_s", [40 * 86_400, -40 * 86_400])
def test_kept_so_long_from_now_whatever_the_clock_was_set_to(volume: Path, ahead_s: int) -> None:
    identifier = orphan_in(volume).id

    class Set(Kernel):
        def now_ns(self) -> int:
            return super().now_ns() + ahead_s * 10**9

    keep(volume, identifier, RetentionFromNow(3 * 86_400), Set())
    for kernel in (Kernel(), Set()):
        now = read_now(kernel)
        expires_ns = record_in(volume, identifier).expires_ns(now)
        assert expires_ns is not None
        assert expires_ns - now.wall_ns >= 3 * 86_400 * 10**9


def test_longest_term_fits_a_record(volume: Path) -> None:
    identifier = orphan_in(volume).id
    assert keep(volume, identifier, RetentionFromNow(DURATION_MAX_S)).retention_s == DURATION_MAX_S
    assert entries(volume)[0].problem == ""


def test_term_that_it_has_already_writes_nothing(volume: Path) -> None:
    identifier = orphan_in(volume, options=SwapOptions(retention_s=None)).id
    assert "write" not in calls_of(lambda kernel: keep(volume, identifier, PINNED, kernel))


@pytest.mark.parametrize(
    ("state", "told", "way"), [("reaping", "already being reaped", "trashd restore"), ("quarantine", "quarantine", "")]
)
def test_what_is_no_orphan_any_more_can_not_be_kept_and_that_is_said(
    volume: Path, state: str, told: str, way: str
) -> None:
    orphan = place(volume, orphan_in(volume).id)
    orphan.rename(orphan.parents[1] / state / orphan.name)
    with pytest.raises(Refused, match=told) as caught:
        keep(volume, orphan.name)
    assert way in caught.value.hint


def test_what_is_gone_is_not_found(volume: Path) -> None:
    identifier = orphan_in(volume).id
    entry = find_container(Kernel(), [bytes(volume)], identifier)
    reap_now(volume, identifier)
    with pytest.raises(NotFound):
        change_retention(Kernel(), [bytes(volume)], entry, PINNED)


def test_lock_on_a_record_pins_it_as_long_as_it_is_held(volume: Path) -> None:
    identifier = orphan_in(volume).id
    with (place(volume, identifier) / "record.json").open("rb") as record:
        fcntl.flock(record, fcntl.LOCK_SH)
        assert reap_now(volume, identifier).lost == "busy"
        with pytest.raises(Busy):
            keep(volume, identifier)
    assert reap_now(volume, identifier).lost is None


def test_root_keeps_a_users_orphan_with_his_hands(volume: Path) -> None:
    identifier = orphan_of(OTHER, volume, SwapOptions()).id
    assert keep(volume, identifier).expires_ns is None
    assert (place(volume, identifier) / "record.json").stat().st_uid == OTHER


def left_by_a_killed_keep(volume: Path) -> str:
    """The id of an orphan with an unfinished record beside its own."""
    identifier = orphan_in(volume).id
    number = list(calls_of(lambda kernel: keep(volume, identifier, PINNED, kernel))).index("create") + 1
    keep(volume, identifier, DefaultRetention())
    code_of_child(partial(keep, volume, identifier, PINNED, Kernel(DyingAt(number))))
    assert (place(volume, identifier) / "record.json.new").exists()
    return identifier


@pytest.mark.parametrize("act", [keep, restore, reap_now])
def test_what_a_killed_keep_left_goes_with_the_next_work_on_the_orphan(
    volume: Path, act: Callable[[Path, str], object]
) -> None:
    identifier = left_by_a_killed_keep(volume)
    act(volume, identifier)
    assert list((volume / ".trashd").glob("u/0/*/*/record.json.new")) == []
    assert {entry.id for entry in entries(volume)} == ({identifier} if act is keep else set())


SCALE = 0x47504653


class ScaleKernel(Kernel):
    """Takes a directory's filesystem for Storage Scale, where a file without blocks is what was migrated."""

    def filesystem(self, fd: int) -> int:
        return SCALE


def hole(path: Path, n_bytes: int = 1 << 20) -> Path:
    path.touch()
    os.truncate(path, n_bytes)
    return path


def test_a_file_without_blocks_may_be_archived_where_there_are_archives(volume: Path) -> None:
    with hole(volume / "large").open() as large, hole(volume / "small", 100).open() as small:
        assert may_be_archived(ScaleKernel(), large.fileno())
        assert not may_be_archived(ScaleKernel(), small.fileno())
        assert not may_be_archived(Kernel(), large.fileno())
    (volume / "full").write_bytes(bytes(8192))
    with (volume / "full").open() as full:
        assert not may_be_archived(ScaleKernel(), full.fileno())


def test_cat_refuses_what_may_be_archived(volume: Path) -> None:
    kernel = ScaleKernel()
    with kernel.open_path(bytes(hole(volume / "f")), os.O_PATH) as fd, pytest.raises(Refused, match="archive"):
        next(content_of(kernel, fd, b"f"))


def test_diff_calls_what_may_be_archived_unreadable(volume: Path) -> None:
    kernel = ScaleKernel()
    for name, mtime in (("a", 1), ("b", 2)):
        (volume / name).mkdir()
        os.utime(hole(volume / name / "f"), (mtime, mtime))
    with (
        kernel.open_path(bytes(volume / "a"), os.O_RDONLY) as a,
        kernel.open_path(bytes(volume / "b"), os.O_RDONLY) as b,
    ):
        found = list(find_differences(kernel, a, b, b"", includes_new=True))
    assert found == [Difference(b"f", "unreadable")]


def test_list_walks_no_tree(volume: Path) -> None:
    small = {"a": "1"}
    orphan_in(volume, spec=small)
    n_calls = len(calls_of(lambda kernel: _list(kernel, volume)))
    command(volume, "reap", "--all", "--now")
    orphan_in(volume, "large", spec={f"d{i}": {f"{j}": "" for j in range(9)} for i in range(50)})
    assert len(calls_of(lambda kernel: _list(kernel, volume))) == n_calls


def _list(kernel: Kernel, volume: Path) -> None:
    from fusefs.store.orphans import list_all_containers

    assert len(list_all_containers(kernel, [bytes(volume)])) == 1


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
    assert problem.what == "no record"
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
