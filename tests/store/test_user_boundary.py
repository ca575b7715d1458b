"""What root carries across the boundary between users: nothing, by any command, however one of them arranges it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import pytest

from fusefs.core.errors import Incomplete, Refused
from fusefs.core.plan_rules import PlanContext, PurgeListed, RuleDone, RuleNotDone, RuleOutcome, read_plan
from fusefs.core.selection import Selection
from fusefs.core.sweep_result import NOT_TAKEN, Swept
from fusefs.core.toml_reader import Source
from fusefs.linux.kernel import Kernel
from fusefs.plan.run_plan import PlanOptions, carry_out
from fusefs.sweep.request import Act, Request, ToDelete, ToTrash
from fusefs.sweep.run import run
from tests.support.other_users import as_user
from tests.support.real_filesystems import tmpfs_volume
from tests.support.store_calls import ActingAt, init

pytestmark = pytest.mark.needs("root")

TEAM, ALICE, BOB = 15000, 15001, 15002
NOW_NS, DAY_NS = 1_700_000_000 * 10**9, 86_400 * 10**9
DELETE = 'older = "30d"\naction = "delete"'


def old(path: Path) -> Path:
    """Give a file, and all directories above it that are new, an age of ninety days."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"content of {path.name}")
    os.utime(path, ns=(NOW_NS - 90 * DAY_NS,) * 2)
    return path


def own(path: Path, uid: int, mode: int = 0o755, gid: int | None = None) -> Path:
    """A directory of a user's."""
    path.mkdir(exist_ok=True)
    os.chown(path, uid, uid if gid is None else gid)
    path.chmod(mode)
    return path


def old_of(path: Path, uid: int, mode: int = 0o644) -> Path:
    """An old file of a user's."""
    old(path)
    os.chown(path, uid, uid)
    path.chmod(mode)
    return path


def as_mate(uid: int, source: Path, target: Path) -> None:
    """A rename by a member of the team."""
    as_user(uid, lambda: source.rename(target), groups=(TEAM,))


@pytest.fixture
def volume() -> Iterator[Path]:
    """Alice's project of the team's, with a thesis that no mate could delete, and a directory of each of them."""
    with tmpfs_volume() as path:
        path.chmod(0o755)
        init(path)
        own(path / "team", 0, 0o2775, TEAM)
        own(path / "team/proj", ALICE, 0o2775, TEAM)
        own(path / "team/proj/private", ALICE)
        old_of(path / "team/proj/private/thesis", ALICE)
        own(path / "scratch", 0)
        own(path / "scratch/alice", ALICE)
        own(path / "scratch/bob", BOB)
        own(path / "tmp", 0, 0o1777)
        yield path


def carried(
    directory: Path, text: str = DELETE, *, runs: bool = True, kernel: Kernel | None = None
) -> list[RuleOutcome]:
    """What a run of a rule does."""
    plan = f'[[rule]]\ndirectory = "{directory}"\n{text}\n'
    rules = read_plan([Source("plan", plan)], PlanContext(NOW_NS, time.mktime, int, int))
    return list(carry_out(kernel or Kernel(), rules, PlanOptions(runs, NOW_NS)))


def swept(directory: Path, text: str = DELETE, *, runs: bool = True, kernel: Kernel | None = None) -> Swept:
    (told,) = (one for one in carried(directory, text, runs=runs, kernel=kernel) if not isinstance(one, PurgeListed))
    assert isinstance(told, RuleDone), told
    return told.swept


def sweep(
    directory: Path,
    act: Act,
    names: Sequence[bytes] | None = None,
    kinds: str = "f",
    kernel: Kernel | None = None,
) -> Swept:
    """A sweep that root types."""
    selection = Selection(types=frozenset(kinds))
    return run(kernel or Kernel(), Request(os.fsencode(directory), selection, act, names=names))


def left(told: Swept) -> list[bytes]:
    assert {one.call for one in told.failures} <= {NOT_TAKEN}
    assert told.sums.n_failed == len(told.failures)
    return sorted(one.name for one in told.failures)


# Taking


def test_what_a_mate_moves_under_the_name_of_a_rule_stays_and_is_reported(volume: Path) -> None:
    as_mate(BOB, volume / "team/proj", volume / "scratch/bob/tmp")
    *_, told = carried(volume / "scratch/*/tmp")
    assert isinstance(told, RuleNotDone)
    assert isinstance(told.error, Incomplete)
    assert told.error.exit_code == 13
    as_mate(BOB, volume / "scratch/bob/tmp", volume / "team/proj")
    assert (volume / "team/proj/private/thesis").read_text() == "content of thesis"


ACTIONS = {
    "delete": DELETE,
    "trash": 'older = "30d"',
    "move": 'older = "30d"\naction = "move"\nmove_to = "{}/archive"',
    "units": f'{DELETE}\nunit = "top"',
    "units to the trash": 'older = "30d"\nunit = "top"',
}


@pytest.mark.parametrize("action", ACTIONS)
def test_what_a_mate_moves_into_a_directory_that_is_swept_stays_and_is_reported(volume: Path, action: str) -> None:
    own(volume / "archive", 0)
    own(volume / "scratch/bob/job", BOB)
    old_of(volume / "scratch/bob/job/old", BOB)
    as_mate(BOB, volume / "team/proj", volume / "scratch/bob/job/proj")
    text = ACTIONS[action].format(volume)
    would, told = swept(volume / "scratch/bob", text, runs=False), swept(volume / "scratch/bob", text)
    whole = "units" in action
    assert left(told) == left(would) == [b"job" if whole else b"job/proj"]
    assert (volume / "scratch/bob/job/proj/private/thesis").exists()
    assert (volume / "scratch/bob/job/old").exists() is whole


def test_members_directories_in_a_project_are_taken_from_the_second_run_on(volume: Path) -> None:
    own(volume / "team/proj/bob", BOB, 0o2775, TEAM)
    for number in range(3):
        old_of(volume / f"team/proj/bob/{number}", BOB)
        (volume / "team/proj/bob/young").write_text("in daily use")
        assert left(swept(volume / "team")) == ([b"proj/bob"] if number == 0 else [])
        assert sorted(os.listdir(volume / "team/proj/bob")) == (["0", "young"] if number == 0 else ["young"])
    as_mate(ALICE, volume / "team/proj/bob", volume / "team/proj/moved")
    old_of(volume / "team/proj/moved/3", BOB)
    assert left(swept(volume / "team")) == []


def test_directory_that_was_seen_elsewhere_was_not_there_before(volume: Path) -> None:
    own(volume / "team/proj/bob", BOB, 0o2775, TEAM)
    old_of(volume / "team/proj/bob/notes", BOB)
    swept(volume / "team")
    own(volume / "team/proj/other", ALICE, 0o2775, TEAM)
    as_mate(ALICE, volume / "team/proj/bob", volume / "team/proj/other/bob")
    assert left(swept(volume / "team")) == [b"proj/other/bob"]


def test_neither_a_dry_run_nor_another_rule_has_seen_anything(volume: Path) -> None:
    own(volume / "team/proj/bob", BOB, 0o2775, TEAM)
    old_of(volume / "team/proj/bob/notes", BOB)
    swept(volume / "team", runs=False)
    swept(volume / "team/proj")
    assert left(swept(volume / "team")) == [b"proj/bob"]
    assert left(swept(volume / "team")) == []


def test_first_run_takes_from_users_directories_in_one_of_roots(volume: Path) -> None:
    for uid, name in ((ALICE, "a"), (BOB, "b")):
        own(volume / f"tmp/{name}", uid, 0o700)
        own(volume / f"tmp/{name}/in", uid, 0o700)
        old_of(volume / f"tmp/{name}/in/old", uid)
    assert swept(volume / "tmp").sums.n_done == 2
    old_of(volume / "tmp/a/in/old", ALICE)
    assert sweep(volume / "tmp", ToDelete()).sums.n_done == 1


def test_directory_of_roots_that_lies_in_a_users_is_no_way_to_another_users(volume: Path) -> None:
    own(volume / "team/roots", 0, 0o2775, TEAM)
    own(volume / "team/roots/alice", ALICE)
    old_of(volume / "team/roots/alice/mail", ALICE)
    old(volume / "team/roots/log")
    as_mate(BOB, volume / "team/roots", volume / "scratch/bob/roots")
    assert left(swept(volume / "scratch")) == [b"bob/roots/alice"]
    assert not (volume / "scratch/bob/roots/log").exists()


def test_sweep_that_root_types_knows_no_earlier_run(volume: Path) -> None:
    as_mate(BOB, volume / "team/proj", volume / "scratch/bob/proj")
    for _ in range(2):
        assert left(sweep(volume / "scratch", ToDelete())) == [b"bob/proj"]
        assert left(sweep(volume / "scratch", ToTrash(), kinds="d")) == [b"alice", b"bob"][1:]
        own(volume / "scratch/alice", ALICE)
    assert left(sweep(volume / "scratch", ToDelete(), [b"bob/proj/private/thesis"])) == [b"bob/proj/private"]
    with pytest.raises(Refused, match="leads from one user's directory into another's"):
        sweep(volume / "scratch/bob/proj", ToDelete())
    assert (volume / "scratch/bob/proj/private/thesis").exists()


def test_what_comes_in_the_place_of_a_directory_that_was_seen_stays(volume: Path) -> None:
    own(volume / "scratch/bob/job", ALICE, 0o2775, TEAM)
    own(volume / "scratch/bob/job/private", ALICE)
    for moment in count():
        swept(volume / "scratch/bob")
        acting = ActingAt(moment, lambda: exchange(volume))
        swept(volume / "scratch/bob", kernel=Kernel(lambda call: acting(call) if call == "openat2" else None))
        was_exchanged = not (volume / "team/proj").exists()
        assert (volume / ("scratch/bob/job" if was_exchanged else "team/proj") / "private/thesis").exists(), moment
        if not was_exchanged:
            break
        as_mate(BOB, volume / "scratch/bob/job", volume / "team/proj")
        as_mate(BOB, volume / "scratch/bob/away", volume / "scratch/bob/job")
        Path("/var/lib/trashd/plan-directories").unlink(missing_ok=True)
    assert moment > 5


def exchange(volume: Path) -> None:
    as_mate(BOB, volume / "scratch/bob/job", volume / "scratch/bob/away")
    as_mate(BOB, volume / "team/proj", volume / "scratch/bob/job")


def test_purge_lists_name_nothing_that_is_not_taken(volume: Path) -> None:
    as_mate(BOB, volume / "team/proj", volume / "scratch/bob/proj")
    text = f'{DELETE}\npurgelist = {{ directory = "{volume}/lists", ahead = "7d" }}'
    soon = volume / "scratch/bob/proj/private/soon"
    soon.write_text("soon")
    os.utime(soon, ns=(NOW_NS - 26 * DAY_NS,) * 2)
    os.chown(soon, ALICE, ALICE)
    swept(volume / "scratch", text)
    assert os.listdir(volume / "lists") == []
    swept(volume / "scratch", text)
    assert "proj/private/soon" in next((volume / "lists").iterdir()).read_text()
