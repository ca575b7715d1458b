"""What lets go of an orphan: its retention, and a reap, which a rival does not share and a kill does not end."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from time import monotonic

import pytest

from fusefs.core.container_states import State
from fusefs.core.errors import Busy, UsageError
from fusefs.core.names import ContainerId
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.reaper.reap import reap
from tests.support.make_trees import IMMUTABLE, bulky_tree, deep_chain, make_tree, roomy_volume, set_flags, snapshot
from tests.support.other_users import as_user
from tests.support.outside_tree import Canary
from tests.support.real_filesystems import ALL_FILESYSTEMS
from tests.support.reap_process import BROKEN, DONE, KILLED, QUARANTINED, Reaping, start_and_stop, start_reap, state_of
from tests.support.small_orphans import EXPIRED, OTHER, PINNED, command, ids, orphan_in, orphan_of
from tests.support.store_verbs import (
    ActingAt,
    ActingBefore,
    Counting,
    DyingAt,
    assert_silent,
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
    assert "2 pinned orphans not deleted; --now --pinned" in capsys.readouterr().err


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


N_TRIES = 20


@pytest.fixture
def orphan(volume: Path) -> str:
    return swap(bulky_tree(volume / "job")).id


@pytest.fixture
def stopped_reap(volume: Path, orphan: str) -> Iterator[Reaping]:
    """A reap of it, stopped in the middle."""
    random = Random("stopped")
    for _ in range(N_TRIES):
        stopped = start_and_stop(volume, orphan, random.uniform(0.01, 0.05))
        if stopped is not None:
            yield stopped
            return
        (volume / "job").rmdir()
        bulky_tree(volume / "again").rename(volume / "job")
        orphan = swap(volume / "job").id
    raise AssertionError("every reap was faster than its stop")


def only_id(volume: Path) -> str:
    [container] = (volume / ".trashd/u/0/reaping").iterdir()
    return container.name


def test_second_reaper_is_told_that_the_orphan_is_busy(volume: Path, stopped_reap: Reaping) -> None:
    assert reap_now(volume, only_id(volume)).lost == "busy"
    stopped_reap.signal_all(signal.SIGCONT)
    assert stopped_reap.wait() == DONE


def test_restore_loses_to_a_running_reap_and_changes_nothing(volume: Path, stopped_reap: Reaping) -> None:
    identifier, before = only_id(volume), snapshot(volume / "job")
    with pytest.raises(Busy):
        restore(volume, identifier)
    with pytest.raises(Busy):
        restore(volume, identifier, inside=b"d0", to=volume / "part")
    assert (snapshot(volume / "job"), (volume / "part").exists()) == (before, False)
    stopped_reap.signal_all(signal.SIGCONT)
    assert stopped_reap.wait() == DONE


def test_recovery_leaves_a_running_reap_alone(volume: Path, stopped_reap: Reaping) -> None:
    identifier = only_id(volume)
    assert recover_all(volume) == []
    assert state_of(volume, identifier) is State.REAPING
    stopped_reap.signal_all(signal.SIGCONT)
    assert stopped_reap.wait() == DONE


def test_what_a_killed_reap_left_is_busy_as_long_as_one_of_its_workers_lives(
    volume: Path, stopped_reap: Reaping
) -> None:
    identifier, before = only_id(volume), snapshot(volume / "job")
    stopped_reap.signal_one(stopped_reap.pid, signal.SIGKILL)
    while stopped_reap.pid in stopped_reap.processes():
        os.sched_yield()
    try:
        lost = reap_now(volume, identifier).lost
        if stopped_reap.workers():
            assert lost == "busy"
            with pytest.raises(Busy):
                restore(volume, identifier)
            assert snapshot(volume / "job") == before
    finally:
        stopped_reap.signal_all(signal.SIGCONT)
        stopped_reap.wait()
    if lost is not None:
        assert lost == "busy"
        assert reap_now(volume, identifier).lost is None
    assert state_of(volume, identifier) is None


def test_what_another_reap_is_just_ending_is_gone_and_not_broken(volume: Path) -> None:
    """For a moment it is a container without a record, which many reaps at once took for one that has lost it."""

    def orphan_of(n: int) -> str:
        return swap(make_tree(volume / f"tree{n}", {"file": ""})).id

    calls = Counting()
    reap_now(volume, orphan_of(-1), Kernel(calls))
    lost = set[str | None]()
    last = max(at for at, call in enumerate(calls.calls) if call == "rmdir")
    for n in range(last - 8, last + 1):
        identifier = orphan_of(n)

        def act(identifier: str = identifier) -> None:
            with own(volume) as folder:
                lost.add(reap(folder, ContainerId(identifier)).lost)

        reap_now(volume, identifier, Kernel(ActingAt(n, act)))
    assert lost == {"busy", "gone"}


N_KILLS = int(os.environ.get("TRASHD_TEST_KILLS", "24")) // len(ALL_FILESYSTEMS)
"""On each filesystem; `make soak-reap` asks for a thousand in all."""
WAYS = ("all", "first", "worker")


@dataclass
class Killer:
    random: Random
    longest_s: float | None = None  # how long a whole reap takes here, about; the first is left alone to tell
    n_reaps: int = 0
    n_hits: dict[str, int] = field(default_factory=lambda: dict.fromkeys(WAYS, 0))

    def reap(self, volume: Path, identifier: str) -> tuple[int, bool]:
        """Reap, and kill what does it; its exit code, and whether a kill hit it."""
        began_s = monotonic()
        reaping = start_reap(volume, identifier)
        self.n_reaps += 1
        is_hit = False
        if self.longest_s is not None:
            # Twice random: what earlier kills left takes less than a whole tree.
            is_hit = not reaping.has_ended(self.random.random() * self.random.random() * self.longest_s)
        if is_hit:
            self._kill(reaping)
        code = reaping.wait()
        if self.longest_s is None:
            self.longest_s = monotonic() - began_s
        elif not is_hit:
            self.longest_s *= 0.9  # a busy machine may have been slow at the first
        return code, is_hit

    def _kill(self, reaping: Reaping) -> None:
        workers = reaping.workers()
        way = self.random.choice([*WAYS, "worker"] if workers else WAYS[:2])
        match way:
            case "all":
                reaping.signal_all(signal.SIGKILL)
            case "first":
                reaping.signal_one(reaping.pid, signal.SIGKILL)
            case _:
                reaping.signal_one(self.random.choice(workers), signal.SIGKILL)
        self.n_hits[way] += 1


@pytest.fixture(params=ALL_FILESYSTEMS)
def roomy(request: pytest.FixtureRequest) -> Iterator[Path]:
    with roomy_volume(request.param, 40_000) as path:
        yield path
        assert_silent(path)


def reap_on(killer: Killer, volume: Path, identifier: str, canary: Canary) -> int:
    """Reap and kill until one reap ends as it wants to; its exit code."""
    while True:
        code, is_hit = killer.reap(volume, identifier)
        canary.assert_untouched()
        assert recover_all(volume) == []
        assert_silent(volume)
        if not is_hit:
            return code
        # A reap that lost a worker may give up, or go on; it must not say that it is done when it is not.
        assert code in (DONE, QUARANTINED, KILLED, BROKEN), code
        if state_of(volume, identifier) is None:
            return DONE  # killed after the record had gone, and the empty container swept by recovery
        assert code != DONE


@pytest.mark.long
@pytest.mark.timeout(900 if N_KILLS > 100 else 120)
def test_reap_killed_at_any_time_is_finished_by_the_next_and_touches_nothing_outside(
    roomy: Path, request: pytest.FixtureRequest
) -> None:
    killer, canary = Killer(Random(f"kills on {request.node.name}")), Canary(roomy)
    while sum(killer.n_hits.values()) < N_KILLS:
        tree = bulky_tree(roomy / "job", 12, 150, 2500)
        (tree / "d0/mount").mkdir()
        canary.link_into(tree)
        identifier = swap(tree).id
        inside = place(roomy, identifier) / "tree"
        with ExitStack() as mounted:
            mounted.enter_context(canary.mounted_in(inside / "d0/mount", inside / "d1/f7"))
            assert reap_on(killer, roomy, identifier, canary) == QUARANTINED
            left = place(roomy, identifier) / "tree"
            assert state_of(roomy, identifier) is State.QUARANTINE
            assert sorted(os.listdir(left)) == ["d0", "d1"]
            assert (os.listdir(left / "d0"), os.listdir(left / "d1")) == (["mount"], ["f7"])
        assert reap_on(killer, roomy, identifier, canary) == DONE
        assert state_of(roomy, identifier) is None
        canary.assert_alone()
        (roomy / "job").rmdir()
    print(f"{request.node.name}: {killer.n_hits} kills in {killer.n_reaps} reaps, {killer.longest_s:.3f} s the longest")
