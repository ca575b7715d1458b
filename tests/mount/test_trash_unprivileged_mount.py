"""The ordinary commands in a mount that its user made without root."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from tests.support.background_mounts import daemon_of
from tests.support.foreground_mount import until
from tests.support.make_trees import Spec, make_tree, snapshot
from tests.support.other_users import as_user, run_as
from tests.support.trashd_command import TRASHD

pytestmark = pytest.mark.needs("root", "fuse")

USER = 1000
N_DIRECTORIES, SLACK = 200, 8


@pytest.fixture
def bench(users_bench: Path) -> Iterator[Path]:
    """The user's own mount of `source` at `target`."""
    trashd("mount", users_bench / "source", users_bench / "target")
    yield users_bench
    trashd("umount", users_bench / "target")


def trashd(*words: str | Path) -> CompletedProcess[bytes]:
    done = run_as(USER, [TRASHD, *words])
    assert done.returncode == 0, done
    return done


def told(*words: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in trashd(*words).stdout.splitlines()]


def test_swap_restore_and_reap(bench: Path) -> None:
    target = bench / "target"
    job = target / "job"
    as_user(USER, lambda: str(make_tree(job, {"a": "x"})))
    before = as_user(USER, lambda: snapshot(job))
    [swapped] = told("swap", "--json", job)
    assert swapped["path"] == str(job)
    assert (os.listdir(bench / "source/job"), as_user(USER, lambda: os.listdir(job))) == ([], [])
    [entry] = told("list", "--json", "--volume", target)
    assert (entry["id"], entry["origin"]) == (swapped["id"], str(job))
    trashd("restore", "--volume", target, swapped["id"])
    assert as_user(USER, lambda: snapshot(job)) == before
    trashd("rm", job)
    trashd("reap", "--all", "--now", "--volume", target)
    assert told("list", "--json", "--volume", target) == []


def test_drop_leads_to_the_users_own_folder(bench: Path) -> None:
    target = bench / "target"
    trashd("init", target)
    as_user(USER, lambda: str(make_tree(target / "job", {"a": "x"})))
    done = run_as(USER, ["mv", target / "job", target / f".trashd-{USER}/drop/"])
    assert (done.returncode, done.stderr) == (0, b"")
    [entry] = told("list", "--json", "--volume", bench / "source")
    assert (entry["method"], entry["uid"]) == ("removed", USER)


@pytest.mark.needs("prune")
def test_after_swap_and_reap_the_daemon_holds_nothing_and_all_inodes_are_back(bench: Path) -> None:
    target, daemon = bench / "target", daemon_of(bench / "target")

    def n_fds() -> int:
        return len(os.listdir(f"/proc/{daemon}/fd"))

    def swap_and_reap(spec: Spec) -> None:
        as_user(USER, lambda: str(make_tree(target / "job", spec)))
        [swapped] = told("swap", "--json", target / "job")
        trashd("reap", "--now", "--volume", target, swapped["id"])
        as_user(USER, (target / "job").rmdir)

    swap_and_reap({})  # the store has what it needs by then
    fds, inodes = n_fds(), os.statvfs(bench).f_ffree
    swap_and_reap({f"d{number}": {"a": "x", "b": "y"} for number in range(N_DIRECTORIES)})
    assert until(lambda: n_fds() <= fds + SLACK and os.statvfs(bench).f_ffree >= inodes - SLACK), (n_fds(), fds)
