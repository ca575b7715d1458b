"""What lets go of an orphan: its retention, and a reap of what is asked for."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path

import pytest

from fusefs.core.container_states import State
from fusefs.core.errors import UsageError
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from tests.support.make_trees import IMMUTABLE, deep_chain, set_flags
from tests.support.other_users import as_user
from tests.support.small_orphans import EXPIRED, OTHER, PINNED, command, ids, orphan_in, orphan_of
from tests.support.store_verbs import (
    ActingBefore,
    DyingAt,
    die,
    entries,
    forge,
    in_child,
    place,
    reap_now,
    restore,
    swap,
    tree_of,
)

pytestmark = pytest.mark.needs("root")

DEPTH_LIMIT = 100
"""About what a reap holds open of a chain before it renames the rest up."""


# Retention, by I11


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


@pytest.mark.parametrize("words", [("--all",), ("--all", "--now")])
def test_all_leaves_what_is_pinned_and_says_how_many(
    volume: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    orphan_in(volume, "x", EXPIRED)
    pinned = {orphan_in(volume, name, PINNED).id for name in ("y", "z")}
    assert command(volume, "reap", *words) == 0
    assert ids(volume) == pinned
    assert "2 pinned orphans stay (trashd keep): --now with the ID" in capsys.readouterr().err


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


def test_user_reaps_only_his_own(volume: Path) -> None:
    ours = orphan_in(volume, "x", EXPIRED)
    orphan_of(OTHER, volume, EXPIRED)
    assert as_user(OTHER, partial(command, volume, "reap")) == 0
    assert ids(volume) == {ours.id}


# Reap


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
