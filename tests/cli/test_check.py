"""`trashd check` and `swap --dry-run` say what `swap` then does, and leave nothing behind: a table of places."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from fusefs.core.errors import LacksCall
from tests.support.make_trees import APPEND_ONLY, IMMUTABLE, Seen, Spec, make_tree, set_flags, snapshot
from tests.support.other_users import run_as
from tests.support.real_filesystems import (
    bind_mount,
    btrfs_subvolume,
    full,
    loop_volume,
    overlay_volume,
    project_quota_volume,
    set_project,
    tmpfs_volume,
)
from tests.support.seccomp import CALLS, without
from tests.support.store_calls import assert_silent, init
from tests.support.trashd_command import TRASHD, done_well, trashd

pytestmark = pytest.mark.needs("root")

ALICE, BOB = 1001, 1002
WITH_JSON = (("check", "--json"), ("swap", "--json"))
TREE: Spec = {"file": "x", "below": {"deep": "y"}}


class Case(NamedTuple):
    """Who would swap what, and the exit code that both commands have to have."""

    victim: Path
    code: int
    uid: int = 0


Scene = Callable[[], AbstractContextManager[Case]]
SCENES: dict[str, Scene] = {}


def scene(make: Callable[[], Iterator[Case]]) -> None:
    SCENES[make.__name__] = contextmanager(make)


def owned(path: Path, uid: int) -> Path:
    for one in (path, *path.rglob("*")):
        os.chown(one, uid, uid)
    return path


def make_lower(lower: Path) -> None:
    make_tree(lower / "job", TREE)


@scene
def a_tmpfs_without_a_store() -> Iterator[Case]:
    with tmpfs_volume() as volume:
        yield Case(make_tree(volume / "job", TREE), 0)


@scene
def a_tmpfs_with_a_store() -> Iterator[Case]:
    with tmpfs_volume() as volume:
        init(volume)
        yield Case(make_tree(volume / "job", TREE), 0)


@scene
def a_users_own_below_a_store_of_roots() -> Iterator[Case]:
    with tmpfs_volume() as volume:
        init(volume)
        home = owned(make_tree(volume / "alice", {"job": TREE}), ALICE)
        yield Case(home / "job", 0, ALICE)


@scene
def a_users_own_without_a_store() -> Iterator[Case]:
    with tmpfs_volume() as volume:
        home = owned(make_tree(volume / "alice", {"job": TREE}), ALICE)
        yield Case(home / "job", 0, ALICE)


@scene
def a_users_own_that_he_may_not_write() -> Iterator[Case]:
    with tmpfs_volume() as volume:
        init(volume)
        home = owned(make_tree(volume / "alice", {"job": TREE}), ALICE)
        (home / "job").chmod(0o555)
        yield Case(home / "job", 0, ALICE)


@scene
def anothers_in_his_own_directory() -> Iterator[Case]:
    with tmpfs_volume() as volume:
        init(volume)
        home = owned(make_tree(volume / "bob", {"job": TREE}), BOB)
        yield Case(home / "job", 3, ALICE)


@scene
def anothers_that_he_may_write() -> Iterator[Case]:
    with tmpfs_volume() as volume:
        init(volume)
        shared = make_tree(volume / "shared", {"job": TREE})
        for path in (shared, owned(shared / "job", BOB)):
            path.chmod(0o777)
        yield Case(shared / "job", 3, ALICE)


@scene
def anothers_without_a_store() -> Iterator[Case]:
    with tmpfs_volume() as volume:
        home = owned(make_tree(volume / "bob", {"job": TREE}), BOB)
        yield Case(home / "job", 6, ALICE)


@scene
def anothers_closed_directory() -> Iterator[Case]:
    with tmpfs_volume() as volume:
        init(volume)
        home = owned(make_tree(volume / "bob", {"job": TREE}), BOB)
        (home / "job").chmod(0o700)
        yield Case(home / "job", 4, ALICE)


@scene
def anothers_in_a_sticky_directory() -> Iterator[Case]:
    with tmpfs_volume() as volume:
        init(volume)
        shared = make_tree(volume / "tmp", {"job": TREE})
        shared.chmod(0o1777)
        (owned(shared / "job", BOB)).chmod(0o777)
        yield Case(shared / "job", 3, ALICE)


@scene
def a_file() -> Iterator[Case]:
    with tmpfs_volume() as volume:
        yield Case(make_tree(volume / "job", TREE) / "file", 3)


@scene
def what_is_missing() -> Iterator[Case]:
    with tmpfs_volume() as volume:
        yield Case(volume / "missing", 5)


@scene
def a_mount_point() -> Iterator[Case]:
    with tmpfs_volume() as volume:
        yield Case(volume, 3)


@scene
def a_store_itself() -> Iterator[Case]:
    with tmpfs_volume() as volume:
        init(volume)
        yield Case(volume / ".trashd", 3)


@scene
def a_kernels_directory() -> Iterator[Case]:
    yield Case(Path("/sys/class"), 6)  # where nothing is ever mounted


@scene
def a_lower_layer() -> Iterator[Case]:
    with overlay_volume(make_lower) as overlay:
        yield Case(overlay.path / "job", 6)


@scene
def a_lower_layer_where_a_store_is() -> Iterator[Case]:
    with overlay_volume(make_lower) as overlay:
        init(overlay.path)
        yield Case(overlay.path / "job", 6)


@scene
def an_upper_layer() -> Iterator[Case]:
    with overlay_volume() as overlay:
        yield Case(make_tree(overlay.path / "job", TREE), 0)


@scene
def a_read_only_mount_without_a_store() -> Iterator[Case]:
    with tmpfs_volume() as volume, tmpfs_volume() as there:
        make_tree(volume / "job", TREE)
        with bind_mount(volume, there, ("ro",)):
            subprocess.run(["mount", "-o", "remount,bind,ro", there], check=True)
            yield Case(there / "job", 11)


@scene
def a_read_only_mount_with_a_store() -> Iterator[Case]:
    with tmpfs_volume() as volume, tmpfs_volume() as there:
        init(volume)
        make_tree(volume / "job", TREE)
        with bind_mount(volume, there):
            subprocess.run(["mount", "-o", "remount,bind,ro", there], check=True)
            yield Case(there / "job", 11)


@scene
def an_immutable_directory() -> Iterator[Case]:
    with loop_volume("ext4") as volume:
        init(volume)
        victim = make_tree(volume / "job", TREE)
        set_flags(victim, IMMUTABLE)
        yield Case(victim, 4)
        set_flags(victim, IMMUTABLE, on=False)


@scene
def a_directory_in_one_where_nothing_may_go() -> Iterator[Case]:
    with loop_volume("ext4") as volume:
        init(volume)
        parent = make_tree(volume / "log", {"job": TREE})
        set_flags(parent, APPEND_ONLY)
        yield Case(parent / "job", 4)
        set_flags(parent, APPEND_ONLY, on=False)


@scene
def an_ext4_that_is_full_and_has_a_reserve() -> Iterator[Case]:
    with loop_volume("ext4") as volume:
        init(volume)
        victim = make_tree(volume / "job", TREE)
        done_well("restore", "--volume", volume, done_well("swap", "--json", victim).objects()[0]["id"])
        with full(volume):
            yield Case(victim, 0)


@scene
def an_ext4_that_is_full_without_a_store() -> Iterator[Case]:
    with loop_volume("ext4") as volume:
        victim = make_tree(volume / "job", TREE)
        with full(volume):
            yield Case(victim, 11)


@scene
def another_project() -> Iterator[Case]:
    with project_quota_volume("xfs") as volume:
        set_project(volume, 1)
        init(volume)
        parent = volume / "other"
        parent.mkdir()
        set_project(parent, 7)
        yield Case(make_tree(parent / "job", TREE), 0)


@scene
def a_subvolume() -> Iterator[Case]:
    with loop_volume("btrfs") as volume:
        init(volume)
        yield Case(btrfs_subvolume(volume, "job"), 0)


@scene
def a_directory_of_a_subvolume() -> Iterator[Case]:
    with loop_volume("btrfs") as volume:
        init(volume)
        yield Case(make_tree(btrfs_subvolume(volume, "sub") / "job", TREE), 0)


def run(case: Case, *words: str) -> subprocess.CompletedProcess[bytes]:
    argv: list[str | Path] = [TRASHD, *words, case.victim]
    return run_as(case.uid, argv) if case.uid else subprocess.run(argv, capture_output=True, check=False)


def snapshot_of(case: Case) -> list[Seen]:
    """All of its volume; of directories that are not the caller's without the times, which that user can't restore."""
    top = next(path for path in (case.victim, *case.victim.parents) if path.is_mount())
    seen = snapshot(top, with_times=True)
    return [one if case.uid in (0, one.uid) else one._replace(mtime_ns=None) for one in seen]


@pytest.mark.needs("loop")
@pytest.mark.parametrize("words", [("check",), ("swap", "--dry-run")], ids=" ".join)
@pytest.mark.parametrize("name", SCENES)
def test_its_exit_code_is_that_of_the_swap(name: str, words: tuple[str, ...]) -> None:
    with SCENES[name]() as case:
        assert (run(case, *words).returncode, run(case, "swap").returncode) == (case.code, case.code)


@pytest.mark.needs("loop")
@pytest.mark.parametrize("name", [name for name in SCENES if name != "a_kernels_directory"])
def test_it_leaves_nothing_behind(name: str) -> None:
    with SCENES[name]() as case:
        before = snapshot_of(case)
        run(case, "check")
        assert snapshot_of(case) == before


@pytest.mark.needs("loop")
@pytest.mark.parametrize("name", SCENES)
def test_it_names_the_store_that_the_swap_uses(name: str) -> None:
    with SCENES[name]() as case:
        checked, swapped = (run(case, *words).stdout for words in WITH_JSON)
        if case.code:
            assert swapped == b""
        else:
            told, done = json.loads(checked), json.loads(swapped)
            assert done["store"].startswith(f"{told['store']}/")
            assert done["method"] == told["method"]


def test_it_says_in_what_the_fresh_directory_would_differ() -> None:
    with SCENES["anothers_in_his_own_directory"]() as case:
        done = run(case, "check")
        assert f"owner {ALICE} instead of {BOB}".encode() in done.stdout


def test_a_difference_that_is_accepted_is_not_refused() -> None:
    with SCENES["anothers_that_he_may_write"]() as case:
        assert [run(case, "swap", *words).returncode for words in (("--dry-run",), ("--dry-run", "--unlike"))] == [3, 0]


def test_of_several_the_exit_code_is_that_of_several() -> None:
    with tmpfs_volume() as volume:
        victims = [make_tree(volume / "job", TREE), volume / "missing"]
        assert (trashd("check", *victims).code, trashd("swap", *victims).code) == (13, 13)


@contextmanager
def job() -> Iterator[Path]:
    """A directory below a store."""
    with tmpfs_volume() as volume:
        init(volume)
        yield make_tree(volume / "job", TREE)
        assert_silent(volume)


def denied(call: str, refusal: int, *words: str | Path) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*without(CALLS[call], refusal), TRASHD, *words], capture_output=True, check=False)


@pytest.mark.parametrize("refusal", [errno.ENOSYS, errno.EPERM], ids=errno.errorcode.get)
@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_is_refused_is_named_and_refuses_a_swap_if_that_needs_it(call: str, refusal: int) -> None:
    needed = call in ("openat2", "statx") or (call, refusal) == ("renameat2", errno.EPERM)
    with job() as victim:
        checked, swapped = (denied(call, refusal, verb, victim) for verb in ("check", "swap"))
        name = f"{call} ({errno.errorcode[refusal]})".encode()
        assert name in checked.stdout + checked.stderr
        assert (name in swapped.stderr) == needed
        assert [checked.returncode, swapped.returncode] == [LacksCall.exit_code if needed else 0] * 2


def test_it_is_named_where_the_store_could_not_be_made_for_it() -> None:
    with tmpfs_volume() as volume:
        victim = make_tree(volume / "job", TREE)
        for verb in ("check", "swap"):
            done = denied("renameat2", errno.EPERM, verb, victim)
            assert (done.returncode, b"renameat2 (EPERM)" in done.stdout + done.stderr) == (LacksCall.exit_code, True)


def test_calls_of_roots_are_missed_by_nobody_else() -> None:
    with job() as victim:
        (told,) = map(
            json.loads, run_as(ALICE, [TRASHD, "check", "--json", "--", owned(victim, ALICE)]).stdout.splitlines()
        )
        assert not {one["call"] for one in told["missing"]} & {"move_mount", "fsopen", "fanotify_init"}
