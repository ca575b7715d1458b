"""What lets go of an orphan: its retention, reap, and what a killed reap leaves."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest

from fusefs.core.container_states import State
from fusefs.core.errors import Busy, Incomplete, UsageError
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.store.container import HeldContainer, claim
from fusefs.store.recover import RESCUED_RETENTION_S
from fusefs.store.stage import SwapOptions
from tests.support.make_trees import IMMUTABLE, Dir, deep_chain, make_tree, set_flags
from tests.support.other_users import as_user
from tests.support.small_orphans import EXPIRED, OTHER, PINNED, TREE, command, ids, orphan_in, orphan_of
from tests.support.store_verbs import (
    ActingBefore,
    DyingAt,
    die,
    entries,
    forge,
    in_child,
    own,
    place,
    reap_now,
    recover_all,
    restore,
    swap,
    tree_of,
)

pytestmark = pytest.mark.needs("root")

DEPTH_LIMIT = 100
"""About what a reap holds open of a chain before it renames the rest up."""


# Retention, by I11


def test_nothing_is_reaped_before_its_retention(volume: Path, capsys: pytest.CaptureFixture[str]) -> None:
    swapped = orphan_in(volume)
    assert command(volume, "reap") == 0
    assert command(volume, "reap", "--all") == 0
    assert command(volume, "reap", swapped.id) == Incomplete.exit_code
    assert "--now" in capsys.readouterr().err
    assert (tree_of(swapped) / "sub/b").read_text() == "2"


def test_reap_without_a_name_takes_what_has_expired_and_nothing_else(volume: Path) -> None:
    expired, kept = orphan_in(volume, "x", EXPIRED), orphan_in(volume, "y")
    assert command(volume, "reap") == 0
    assert ids(volume) == {kept.id}
    assert not tree_of(expired).parent.exists()


def test_reap_of_a_name_takes_that_one_alone(volume: Path) -> None:
    first, second = orphan_in(volume, "x", EXPIRED), orphan_in(volume, "y", EXPIRED)
    assert command(volume, "reap", first.id) == 0
    assert ids(volume) == {second.id}


def test_now_ignores_retention(volume: Path) -> None:
    swapped = orphan_in(volume, options=PINNED)
    assert command(volume, "reap", "--now", swapped.id) == 0
    assert ids(volume) == set()


def test_all_is_all_of_the_callers_own(volume: Path) -> None:
    orphan_in(volume, "x")
    theirs = orphan_of(OTHER, volume, SwapOptions())
    assert command(volume, "reap", "--all", "--now") == 0
    assert ids(volume) == {theirs.id}


@pytest.mark.parametrize("words", [("--all",), ("--all", "--now")])
def test_all_leaves_what_is_pinned_and_says_how_many(
    volume: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    orphan_in(volume, "x", EXPIRED)
    pinned = {orphan_in(volume, name, PINNED).id for name in ("y", "z")}
    assert command(volume, "reap", *words) == 0
    assert ids(volume) == pinned
    assert "2 pinned orphans stay (trashd keep): --now with the ID" in capsys.readouterr().err


def test_what_a_restore_rescued_goes_after_a_week(volume: Path) -> None:
    swapped = orphan_in(volume)
    (volume / "job/meanwhile").write_text("x")
    rescued = restore(volume, swapped.id).rescued
    assert rescued is not None
    assert command(volume, "reap", "--all") == 0
    assert ids(volume) == {rescued}
    week_ago_ns = time.time_ns() - 7 * 86_400 * 10**9
    forge(place(volume, rescued) / "record.json", created_ns=week_ago_ns, boot="another")
    assert command(volume, "reap") == 0
    assert ids(volume) == set()


def test_pinned_takes_the_callers_own_that_are_pinned_and_nothing_else(volume: Path) -> None:
    kept, theirs = orphan_in(volume, "x"), orphan_of(OTHER, volume, PINNED)
    orphan_in(volume, "y", PINNED)
    assert command(volume, "reap", "--pinned", "--now") == 0
    assert ids(volume) == {kept.id, theirs.id}


def test_all_with_pinned_is_all(volume: Path) -> None:
    orphan_in(volume, "x")
    orphan_in(volume, "y", PINNED)
    assert command(volume, "reap", "--all", "--pinned", "--now") == 0
    assert ids(volume) == set()


@pytest.mark.parametrize("words", [("--pinned",), ("--all", "--pinned"), ("--pinned", "--now", "2fe7e4cb8ba8")])
def test_pinned_without_now_or_with_a_name_takes_nothing(volume: Path, words: tuple[str, ...]) -> None:
    swapped = orphan_in(volume, options=PINNED)
    assert command(volume, "reap", *words) == UsageError.exit_code
    assert ids(volume) == {swapped.id}


def test_what_was_pinned_and_named_is_finished_by_the_next_reap(volume: Path) -> None:
    swapped = orphan_in(volume, options=PINNED)
    assert in_child(lambda: reap_now(volume, swapped.id, Kernel(ActingBefore("rmdir", die)))) == DyingAt.EXIT_CODE
    assert command(volume, "reap", "--all") == 0
    assert ids(volume) == set()


def test_reap_by_root_takes_the_expired_ones_of_everybody(volume: Path) -> None:
    orphan_of(OTHER, volume, EXPIRED)
    assert command(volume, "reap") == 0
    assert ids(volume) == set()


def test_user_reaps_only_his_own(volume: Path) -> None:
    ours = orphan_in(volume, "x", EXPIRED)
    orphan_of(OTHER, volume, EXPIRED)
    assert as_user(OTHER, partial(command, volume, "reap")) == 0
    assert ids(volume) == {ours.id}


# Reap


def test_reap_removes_all_kinds_of_things_and_counts_them(volume: Path) -> None:
    job = make_tree(volume / "job", {"dir": {"f": "1"}, "closed": Dir({"f": "1"}, mode=0)})
    os.mkfifo(job / "fifo")
    (job / "link").symlink_to(make_tree(volume / "spared", {"x": "y"}))
    reaped = reap_now(volume, swap(job).id)
    assert (reaped.lost, reaped.report.removed, reaped.report.failures) == (None, 7, ())
    assert (volume / "spared/x").read_text() == "y"
    assert ids(volume) == set()


def test_what_can_not_be_removed_goes_to_quarantine_with_its_errno_and_the_queue_goes_on(
    volume: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stuck, other = orphan_in(volume, "x", EXPIRED), orphan_in(volume, "y", EXPIRED)
    set_flags(tree_of(stuck) / "sub", IMMUTABLE)
    assert command(volume, "reap") == Incomplete.exit_code
    assert os.strerror(errno.EPERM) in capsys.readouterr().out
    (entry,) = entries(volume)
    assert (entry.id, entry.state, entry.n_failed > 0) == (stuck.id, State.QUARANTINE, True)
    assert not tree_of(other).parent.exists()
    left = Path(os.fsdecode(entry.path)) / "tree"
    assert os.listdir(left) == ["sub"]
    set_flags(left / "sub", IMMUTABLE, on=False)


def test_failures_with_the_longest_paths_still_fit_into_the_record(volume: Path) -> None:
    chain = deep_chain(volume / "job", DEPTH_LIMIT - 4, name=b"\xff" * 250)
    stuck = swap(chain)
    fd = Fd(os.open(tree_of(stuck), os.O_PATH))
    for _ in range(DEPTH_LIMIT - 4):
        with fd as above:
            fd = Fd(os.open(b"\xff" * 250, os.O_PATH, dir_fd=above))
    with fd:
        link = Path(f"/proc/self/fd/{fd}/leaf")
        set_flags(link, IMMUTABLE)
        assert reap_now(volume, stuck.id).report.n_failed
        assert [entry.state for entry in entries(volume)] == [State.QUARANTINE]
        set_flags(link, IMMUTABLE, on=False)


@pytest.mark.quick("reap")
def test_killed_reap_is_finished_by_the_next(volume: Path) -> None:
    swapped = orphan_in(volume, options=EXPIRED)
    assert in_child(lambda: reap_now(volume, swapped.id, Kernel(ActingBefore("rmdir", die)))) == DyingAt.EXIT_CODE
    assert [entry.state for entry in entries(volume)] == [State.REAPING]
    assert command(volume, "reap") == 0
    assert ids(volume) == set()


def test_restore_of_what_was_half_reaped_returns_what_is_left_and_says_so(volume: Path) -> None:
    swapped = orphan_in(volume)
    in_child(lambda: reap_now(volume, swapped.id, Kernel(ActingBefore("rmdir", die))))
    restored = restore(volume, swapped.id)
    assert restored.partial
    assert os.listdir(volume / "job") == ["sub"]
    assert ids(volume) == set()


@pytest.mark.parametrize("call", ["write", "fsync", "rename", "renameat2"])
def test_restore_killed_on_its_way_from_a_reap_knows_that_the_tree_is_not_whole(volume: Path, call: str) -> None:
    swapped = orphan_in(volume)
    in_child(lambda: reap_now(volume, swapped.id, Kernel(ActingBefore("rmdir", die))))
    killed = in_child(partial(restore, volume, swapped.id, Kernel(ActingBefore(call, die))))
    assert killed == DyingAt.EXIT_CODE
    recover_all(volume)
    assert restore(volume, swapped.id, to=volume / "elsewhere").partial


@pytest.mark.quick("reap")
def test_restore_loses_to_a_claim(volume: Path) -> None:
    swapped = orphan_in(volume)
    with own(volume) as folder:
        held = claim(folder, State.ORPHANS, swapped.id)
        assert isinstance(held, HeldContainer)
        with held:
            with pytest.raises(Busy):
                restore(volume, swapped.id)
            assert reap_now(volume, swapped.id).lost == "busy"
    reap_now(volume, swapped.id)


def test_deep_chain_is_reaped_with_few_fds(volume: Path) -> None:
    swapped = swap(deep_chain(volume / "job", 1500))
    most = 0

    def look(_call: str) -> None:
        nonlocal most
        if _call == "rmdir":
            most = max(most, len(os.listdir("/proc/self/fd")))

    before = len(os.listdir("/proc/self/fd"))
    reaped = reap_now(volume, swapped.id, Kernel(look))
    assert reaped.report.n_failed == 0
    assert most - before < DEPTH_LIMIT + 32
    assert ids(volume) == set()


def test_nothing_that_was_moved_up_by_a_killed_reap_is_lost_by_a_restore(volume: Path) -> None:
    swapped = swap(deep_chain(volume / "job", 3 * DEPTH_LIMIT))
    in_child(lambda: reap_now(volume, swapped.id, Kernel(ActingBefore("rmdir", die))))
    restored = restore(volume, swapped.id)
    assert restored.partial
    assert any("structure" in warning for warning in restored.warnings)
    (kept,) = entries(volume)
    assert kept.expires_ns == kept.created_ns + RESCUED_RETENTION_S * 10**9
    found = subprocess.run(["find", os.fsdecode(kept.path) + "/tree", "-name", "leaf"], capture_output=True, check=True)
    assert found.stdout.count(b"leaf\n") == 1


def test_reap_goes_on_although_somebody_holds_it(volume: Path) -> None:
    job = make_tree(volume / "job", TREE)
    with (job / "a").open() as held:
        reap_now(volume, swap(job).id)
        assert held.read() == "1"
    assert ids(volume) == set()
