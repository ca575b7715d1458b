"""`trashd check` and `swap --dry-run` say what `swap` then does, and leave nothing behind: a table of places."""

import errno
import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from fusefs.core.errors import LacksCall
from tests.support.make_trees import EntrySnapshot, make_tree, owned, snapshot
from tests.support.other_users import run_as
from tests.support.real_filesystems import tmpfs_volume
from tests.support.seccomp import CALLS
from tests.support.store_verbs import assert_silent, init
from tests.support.swap_places import ALICE, BOB, SCENES, TREE, SwapPlace
from tests.support.trashd_command import TRASHD, instead_of_exec, trashd, trashd_without

pytestmark = pytest.mark.needs("root")

KERNELS = {"a_kernels_directory", "a_directory_of_proc", "a_control_group", "where_no_name_may_have_a_dot"}
"""What the kernel shows is not the same twice."""
BEHIND = {"a_mount_of_ours", "another_branch_than_the_stores"}
"""Where a directory's times are remembered, or another branch's, when they are given back below."""


def run(scene: SwapPlace, victim: Path, *words: str) -> subprocess.CompletedProcess[bytes]:
    argv: list[str | Path] = [TRASHD, *words, victim]
    return run_as(scene.uid, argv) if scene.uid else run_as_root(argv)


def run_as_root(argv: list[str | Path]) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(argv, capture_output=True, check=False, preexec_fn=instead_of_exec(argv))


def snapshot_of(scene: SwapPlace, victim: Path, *, is_behind: bool) -> list[EntrySnapshot]:
    """All of its volume; of directories that are not the caller's without the times, which that user can't restore."""
    top = next(path for path in (victim, *victim.parents) if path.is_mount())
    tree_before = snapshot(top, with_times=not is_behind)
    return [one if scene.uid in (0, one.uid) else one._replace(mtime_ns=None) for one in tree_before]


@pytest.mark.needs("loop")
@pytest.mark.parametrize("name", SCENES)
def test_it_says_what_the_swap_does_and_leaves_nothing_behind(name: str) -> None:
    scene = SCENES[name]
    with scene.victim() as victim:
        seen = partial(snapshot_of, scene, victim, is_behind=name in BEHIND)
        before = [] if name in KERNELS else seen()
        ahead = [run(scene, victim, *words) for words in (("swap", "--dry-run"), ("check", "--json"))]
        assert name in KERNELS or seen() == before
        checked, swapped = ahead[-1], run(scene, victim, "swap", "--json")
        assert [one.returncode for one in (*ahead, swapped)] == [scene.code] * 3
        told, done = (json.loads(one.stdout or one.stderr) for one in (checked, swapped))
        if scene.code:
            assert done["message"] == (told["message"] if "message" in told else told["refusals"][0][0])
            assert swapped.stdout == b""
        else:
            assert done["store"].startswith(f"{told['store']}/")
            assert done["method"] == told["method"]


def test_it_says_in_what_the_fresh_directory_would_differ() -> None:
    scene = SCENES["anothers_in_his_own_directory"]
    with scene.victim() as victim:
        done = run(scene, victim, "check")
        assert f"owner {ALICE} instead of {BOB}".encode() in done.stdout


def test_a_difference_that_is_accepted_is_not_refused() -> None:
    scene = SCENES["anothers_that_he_may_write"]
    with scene.victim() as victim:
        assert [
            run(scene, victim, "swap", *words).returncode for words in (("--dry-run",), ("--dry-run", "--unlike"))
        ] == [3, 0]


@pytest.mark.needs("loop", "btrfs")
def test_a_read_only_snapshot_is_refused_where_a_difference_is_accepted_too() -> None:
    with SCENES["a_snapshot_that_is_read_only"].victim() as victim:
        assert [trashd("swap", *words, victim).code for words in (("--unlike", "--dry-run"), ("--unlike",))] == [11, 11]


@contextmanager
def job() -> Iterator[Path]:
    """A directory below a store."""
    with tmpfs_volume() as volume:
        init(volume)
        yield make_tree(volume / "job", TREE)
        assert_silent(volume)


@pytest.mark.parametrize("refusal", [errno.ENOSYS, errno.EPERM], ids=errno.errorcode.get)
@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_is_refused_is_named_and_refuses_a_swap_if_that_needs_it(call: str, refusal: int) -> None:
    needed = call in ("openat2", "statx") or (call, refusal) == ("renameat2", errno.EPERM)
    with job() as victim:
        checked, swapped = (trashd_without(CALLS[call], verb, victim, refusal=refusal) for verb in ("check", "swap"))
        name = f"{call} ({errno.errorcode[refusal]})"
        assert name in checked.out + checked.err
        assert (name in swapped.err) == needed
        assert [checked.code, swapped.code] == [LacksCall.exit_code if needed else 0] * 2


def test_it_is_named_where_the_store_could_not_be_made_for_it() -> None:
    with tmpfs_volume() as volume:
        victim = make_tree(volume / "job", TREE)
        for verb in ("check", "swap"):
            done = trashd_without(CALLS["renameat2"], verb, victim)
            assert (done.code, "renameat2 (EPERM)" in done.out + done.err) == (LacksCall.exit_code, True)


def test_calls_of_roots_are_missed_by_nobody_else() -> None:
    with job() as victim:
        (told,) = map(
            json.loads, run_as(ALICE, [TRASHD, "check", "--json", "--", owned(victim, ALICE)]).stdout.splitlines()
        )
        assert not {one["call"] for one in told["missing"]} & {"move_mount", "fsopen"}
