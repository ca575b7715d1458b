"""A plan carried out: it does what it says that it would, and nothing that others could lead it to."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from fusefs.core.errors import NotFound, Refused
from fusefs.core.plan_rules import PlanContext, PurgeListed, RuleDone, RuleNotDone, RuleOutcome, read_plan
from fusefs.core.record import Failure
from fusefs.core.results import KEPT_BY_OTHERS, LOCKED_BY_OTHERS, LOCKED_BY_UNKNOWN, Spared, Swept
from fusefs.core.toml_reader import Source
from fusefs.linux.kernel import Kernel
from fusefs.plan.run_plan import PlanOptions, carry_out
from fusefs.sweep.request import Request, SweepWishes
from fusefs.sweep.run import NOTHING_SPECIAL, run
from tests.plan.test_run_plan_units import locked
from tests.plan.test_run_plan_units import put as put_at
from tests.support.make_trees import snapshot
from tests.support.other_users import as_user
from tests.support.real_filesystems import tmpfs_volume
from tests.support.run_sweep import give
from tests.support.store_verbs import entries, restore
from tests.support.tried_pages import in_bash

pytestmark = pytest.mark.needs("root")

ALICE, MALLORY = 12001, 12666
NOW_NS, DAY_NS = 1_700_000_000 * 10**9, 86_400 * 10**9


@pytest.fixture
def volume() -> Iterator[Path]:
    with tmpfs_volume() as path:
        path.chmod(0o755)
        yield path


def put(path: Path, age_days: float) -> Path:
    """A file of that age, and the directories above it, as old as a directory can be."""
    return put_at(path, NOW_NS - int(age_days * DAY_NS))


def carried(
    directory: Path | str,
    text: str,
    *,
    runs: bool = True,
    now_ns: int = NOW_NS,
    wishes: SweepWishes = NOTHING_SPECIAL,
    kernel: Kernel | None = None,
) -> list[RuleOutcome]:
    plan = f'[[rule]]\ndirectory = "{directory}"\n{text}\n'
    rules = read_plan([Source("plan", plan)], PlanContext(now_ns, time.mktime, int, int))
    return list(carry_out(kernel or Kernel(), rules, PlanOptions(runs, now_ns, wishes)))


def swept(directory: Path | str, text: str, *, runs: bool = True) -> Swept:
    (told,) = carried(directory, text, runs=runs)
    assert isinstance(told, RuleDone), told
    return told.swept


def files(top: Path) -> set[str]:
    return {str(path.relative_to(top)) for path in top.rglob("*") if not path.is_dir()}


OLD = 'older = "30d"'
ACTIONS = ['action = "trash"', 'action = "delete"', 'action = "move"\nmove_to = "{}/away"']


@pytest.mark.parametrize("unit", ["", 'unit = "top"'])
@pytest.mark.parametrize("action", ACTIONS)
def test_dry_run_tells_what_a_run_does_and_touches_nothing(volume: Path, action: str, unit: str) -> None:
    (volume / "away").mkdir()
    for name, age_days in {"a/old": 31, "a/b/old": 40, "c/new": 29, "c/old": 50, "top": 31, "new": 1}.items():
        put(volume / "scratch" / name, age_days)
    text = f"{OLD}\n{unit}\n{action.format(volume)}"
    before = snapshot(volume, with_times=True)
    would = swept(volume / "scratch", text, runs=False)
    assert snapshot(volume, with_times=True) == before
    did = swept(volume / "scratch", text)
    assert (would.sums.n_done, would.sums.n_bytes) == (did.sums.n_done, did.sums.n_bytes)
    assert (did.sums.n_done, did.sums.n_bytes) == ((2, 21) if unit else (4, 28))
    assert files(volume / "scratch") == ({"c/new", "c/old", "new"} if unit else {"c/new", "new"})


@pytest.mark.parametrize("text", [OLD, f'{OLD}\nunit = "top"\nkeep_for = "3d"'])
def test_what_is_trashed_can_be_taken_back(volume: Path, text: str) -> None:
    for name in ("a/x", "a/b/y", "z"):
        put(volume / "scratch" / name, 40)
    before = files(volume / "scratch")
    orphan = swept(volume / "scratch", text).orphan
    assert orphan is not None
    assert files(volume / "scratch") == set()
    restore(volume, orphan)
    assert files(volume / "scratch") == before


def test_orphan_is_roots_and_says_whose_rule_it_was(volume: Path) -> None:
    put(volume / "home/old", 40)
    os.chown(volume / "home", ALICE, ALICE)
    os.chown(volume / "home/old", ALICE, ALICE)
    swept(volume / "home", f'{OLD}\nkeep_for = "3d"')
    (entry,) = entries(volume)
    assert (entry.uid, entry.note) == (0, "plan plan: rule[1]")


@pytest.mark.parametrize("unit", ["", 'unit = "top"'])
def test_what_is_locked_or_kept_is_left_and_told(volume: Path, unit: str) -> None:
    for name in ("a/old", "b/old", "c/.trashd-keep", "c/deep/old", "d"):
        put(volume / "scratch" / name, 40)
    with locked(volume / "scratch/a/old"):
        told = swept(volume / "scratch", f'{OLD}\naction = "delete"\n{unit}')
    assert files(volume / "scratch") == {"a/old", "c/.trashd-keep", "c/deep/old"}
    where = b"a" if unit else b"a/old"
    assert set(told.spared) == {Spared(where, "locked"), Spared(b"c", "holds .trashd-keep")}
    assert (told.sums.n_done, told.sums.n_spared, told.sums.n_failed) == (2, 2, 0)


@pytest.mark.parametrize("action", ACTIONS)
def test_unit_that_somebody_uses_before_its_turn_comes_stays(volume: Path, action: str) -> None:
    (volume / "away").mkdir()
    used: list[bool] = []
    for number in range(30):
        put(volume / f"scratch/{number}/deep/old", 40)

    def hook(_call: str) -> None:
        left = list((volume / "scratch").iterdir())
        if len(left) < 30 and not used:
            used.append(True)
            for path in left:
                with suppress(FileNotFoundError):  # it is going
                    put(path / "deep/new", 1)

    carried(volume / "scratch", f'{OLD}\nunit = "top"\n{action.format(volume)}', kernel=Kernel(hook))
    n_used = len([path for path in files(volume / "scratch") if path.endswith("new")])
    assert n_used >= 30 - len(os.sched_getaffinity(0))  # workers have one each


@contextmanager
def locked_by(uid: int, directory: Path, script: str = 'exec flock --no-fork -s "$0" cat') -> Iterator[None]:
    """A user's process has a shared lock on a directory; of a shell's own fd its locker is gone."""
    with subprocess.Popen(
        ["sh", "-c", script, directory], user=uid, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"\n")
        assert process.stdout.read(1) == b"\n"
        yield
        process.stdin.close()


LOCKER_IS_GONE = 'exec 9<"$0"; flock -s 9; exec cat'


@contextmanager
def marked(directory: Path, mark: str, uid: int) -> Iterator[None]:
    """A user wants a directory left."""
    match mark:
        case "keep":
            as_user(uid, (directory / ".trashd-keep").touch)
            yield
        case "lock":
            with locked_by(uid, directory):
                yield
        case "link":
            (directory.parent / "roots").touch()
            os.link(directory.parent / "roots", directory / ".trashd-keep")
            yield
        case _:
            with locked_by(uid, directory, LOCKER_IS_GONE):
                yield


@pytest.mark.parametrize("unit", ["", 'unit = "top"'])
@pytest.mark.parametrize("runs", [True, False])
@pytest.mark.parametrize(
    ("mark", "why"), [("keep", KEPT_BY_OTHERS), ("link", KEPT_BY_OTHERS), ("lock", LOCKED_BY_OTHERS)]
)
def test_no_user_ends_a_rule_for_a_shared_directory(volume: Path, mark: str, why: str, unit: str, runs: bool) -> None:
    put(volume / "shared/old", 40)
    (volume / "shared").chmod(0o1777)
    with marked(volume / "shared", mark, MALLORY):
        told = swept(volume / "shared", f'{OLD}\naction = "delete"\n{unit}', runs=runs)
    assert (told.sums.n_done, told.sums.n_failed, told.sums.n_spared) == (1, 1, 0)
    assert told.failures == (Failure(b"", errno.EPERM, why),)
    assert (volume / "shared/old").exists() != runs


@pytest.mark.parametrize("unit", ["", 'unit = "top"'])
@pytest.mark.parametrize("owner", [ALICE, 0])
@pytest.mark.parametrize("mark", ["keep", "lock"])
def test_marks_of_a_directorys_owner_count(volume: Path, mark: str, owner: int, unit: str) -> None:
    put(volume / "theirs/old", 40)
    os.chown(volume / "theirs", owner, owner)
    (volume / "theirs").chmod(0o1777)
    with marked(volume / "theirs", mark, owner):
        told = swept(volume / "theirs", f'{OLD}\naction = "delete"\n{unit}')
    assert (told.sums.n_done, told.sums.n_failed, told.sums.n_spared) == (0, 0, 1)
    assert (volume / "theirs/old").exists()


@pytest.mark.parametrize("unit", ["", 'unit = "top"'])
def test_directory_that_nobody_can_say_who_locked_is_left_and_reported(volume: Path, unit: str) -> None:
    put(volume / "shared/old", 40)
    with marked(volume / "shared", "gone", MALLORY):
        told = swept(volume / "shared", f'{OLD}\naction = "delete"\n{unit}')
    assert told.failures == (Failure(b"", errno.EPERM, LOCKED_BY_UNKNOWN),)
    assert (told.sums.n_done, told.sums.n_failed) == (0, 1)


@pytest.mark.parametrize(
    ("text", "mark"),
    [('unit = "top"', "keep"), ('unit = "top"', "lock"), ('type = "d"\naction = "delete"\nempty = true', "lock")],
)
def test_what_would_go_whole_stays_with_anybodys_mark_and_is_reported(volume: Path, text: str, mark: str) -> None:
    (volume / "shared/unit").mkdir(parents=True)
    if "empty" not in text:
        put(volume / "shared/unit/old", 40)
    (volume / "shared/unit").chmod(0o1777)
    with marked(volume / "shared/unit", mark, MALLORY):
        if mark == "keep":
            put(volume / "shared/unit/.trashd-keep", 40)
        os.utime(volume / "shared/unit", ns=(1, 1))
        told = swept(volume / "shared", f"{OLD}\n{text}")
    assert (told.sums.n_done, told.sums.n_failed) == (0, 1)
    assert (volume / "shared/unit").exists()


@pytest.mark.parametrize("unit", ["", 'unit = "top"'])
@pytest.mark.parametrize("runs", [False, True])
def test_directory_that_is_kept_is_left_whole(volume: Path, unit: str, runs: bool) -> None:
    put(volume / "scratch/old", 40)
    put(volume / "scratch/.trashd-keep", 40)
    assert swept(volume / "scratch", f"{OLD}\n{unit}", runs=runs).sums.n_spared == 1
    assert files(volume / "scratch") == {"old", ".trashd-keep"}


@pytest.mark.parametrize("unit", ["", 'unit = "top"'])
@pytest.mark.parametrize("runs", [False, True])
def test_max_delete_is_exact(volume: Path, unit: str, runs: bool) -> None:
    for number in range(7):
        put(volume / f"scratch/{number}", 40)
    told = swept(volume / "scratch", f'{OLD}\nmax_delete = 5\naction = "delete"\n{unit}', runs=runs)
    assert (told.sums.n_done, told.is_limited) == (5, True)
    assert len(files(volume / "scratch")) == (2 if runs else 7)


@pytest.mark.parametrize("unit", ["", 'unit = "top"'])
def test_what_goes_was_listed_before(volume: Path, unit: str) -> None:
    ages = {"a/x": 22, "a/y": 24, "b/x": 28, "c": 10, "d/e/f": 29.5, "d/e/g": 23.5, "h": 31}
    for name, age_days in ages.items():
        os.chown(put(volume / "scratch" / name, age_days), ALICE, ALICE)
    for name in ("a", "b", "d"):
        os.chown(volume / "scratch" / name, ALICE, ALICE)
    text = f'{OLD}\naction = "delete"\n{unit}\npurgelist = {{ directory = "{volume}/lists", ahead = "7d" }}'
    would = carried(volume / "scratch", text, runs=False)[-1]
    assert files(volume) == {f"scratch/{name}" for name in ages}
    assert carried(volume / "scratch", text)[-1] == would
    lines = (volume / f"lists/{ALICE}.list").read_text().splitlines()[1:]
    listed = {path.removeprefix(f"{volume}/"): when for when, path in (line.split("\t") for line in lines)}
    left = files(volume / "scratch")
    carried(volume / "scratch", text, now_ns=NOW_NS + 7 * DAY_NS)
    gone = {f"scratch/{name}" for name in left - files(volume / "scratch")}
    if unit:
        assert (set(listed), gone) == ({"scratch/b", "scratch/d"}, {"scratch/b/x", "scratch/d/e/f", "scratch/d/e/g"})
        assert listed["scratch/d"] == "2023-11-21T10:13:20Z"  # when the youngest of its files is 30 days old
    else:
        assert set(listed) == gone == {"scratch/a/y", "scratch/b/x", "scratch/d/e/f", "scratch/d/e/g"}


def test_lists_of_who_stops_it_stay_as_they_were(volume: Path) -> None:
    text = f'{OLD}\npurgelist = {{ directory = "{volume}/lists", ahead = "7d" }}'
    os.chown(put(volume / "scratch/a", 25), ALICE, ALICE)
    carried(volume / "scratch", text)
    before = snapshot(volume / "lists")
    os.chown(put(volume / "scratch/b", 25), MALLORY, MALLORY)
    told = carried(volume / "scratch", text, wishes=SweepWishes(stops=lambda: True))
    assert not [one for one in told if isinstance(one, PurgeListed)]
    assert snapshot(volume / "lists") == before


@pytest.mark.parametrize("unit", ["", 'unit = "top"'])
@pytest.mark.parametrize("runs", [True, False])
@pytest.mark.parametrize("is_there", [True, False])
def test_lists_that_lie_in_what_a_rule_sweeps_by_whatever_path_are_refused(
    volume: Path, unit: str, runs: bool, is_there: bool
) -> None:
    put(volume / "scratch/spool/old", 40)
    (volume / "by").symlink_to("scratch/spool")
    if is_there:
        (volume / "scratch/spool/lists").mkdir()
    text = f'{OLD}\naction = "delete"\n{unit}\npurgelist = {{ directory = "{volume}/by/lists", ahead = "7d" }}'
    told, listed = carried(volume / "scratch", text, runs=runs)
    assert isinstance(told, RuleNotDone)
    assert isinstance(told.error, Refused)
    assert f"the purge lists of {volume}/by/lists lie in it" in told.why
    assert isinstance(listed, PurgeListed)
    assert (listed.is_whole, files(volume / "scratch")) == (False, {"spool/old"})


@pytest.mark.parametrize("unit", ["", 'unit = "top"'])
@pytest.mark.parametrize("is_closed", [True, False])
def test_lists_that_lack_what_nobody_could_look_at_say_so(volume: Path, unit: str, is_closed: bool) -> None:
    for name in ("a", "b/c"):
        put(volume / "scratch" / name, 25)
    give(volume, ALICE)
    (volume / "scratch/b").chmod(0 if is_closed else 0o755)
    text = f'{OLD}\n{unit}\npurgelist = {{ directory = "{volume}/lists", ahead = "7d" }}'
    listed = as_user(ALICE, lambda: carried(volume / "scratch", text)[-1])
    assert isinstance(listed, PurgeListed)
    assert (listed.is_whole, listed.n_entries) == (not is_closed, 1 if is_closed else 2)
    (written,) = (volume / "lists").iterdir()
    assert ("# Not complete" in written.read_text()) == is_closed


def test_lists_say_so_too_if_units_were_left_for_another_time(volume: Path) -> None:
    for name in ("a", "b", "c"):
        put(volume / "scratch" / name, 40)
    text = f'{OLD}\nunit = "top"\nmax_delete = 1\npurgelist = {{ directory = "{volume}/lists", ahead = "7d" }}'
    for runs in (False, True):
        listed = carried(volume / "scratch", text, runs=runs)[-1]
        assert isinstance(listed, PurgeListed)
        assert not listed.is_whole


@pytest.mark.parametrize("unit", ["", 'unit = "top"'])
@pytest.mark.parametrize("call", ["create", "rename", "fsync"])
def test_lists_that_can_not_be_written_are_told_and_hold_up_nothing(
    volume: Path, unit: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(called: str) -> None:
        if called == call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("fusefs.plan.purge_lists._BUFFER_MAX_BYTES", 0)
    for name, age_days in {"a": 40, "b": 25, "c": 26, "d": 41}.items():
        put(volume / "scratch" / name, age_days)
    text = f'{OLD}\naction = "delete"\n{unit}\npurgelist = {{ directory = "{volume}/lists", ahead = "7d" }}'
    done, listed = carried(volume / "scratch", text, kernel=Kernel(full))
    assert isinstance(done, RuleDone)
    assert isinstance(listed, PurgeListed)
    assert (done.swept.sums.n_done, listed.error and listed.error.errno) == (2, errno.ENOSPC)
    assert files(volume) == {"scratch/b", "scratch/c"}


def test_users_who_empty_their_lists_end_nobodys_rules(volume: Path) -> None:
    """As an editor's accident does, too."""
    text = f'{OLD}\naction = "delete"\npurgelist = {{ directory = "{volume}/lists", ahead = "7d" }}'
    for uid, age_days in ((ALICE, 25), (MALLORY, 26)):
        os.chown(put(volume / f"scratch/{uid}", age_days), uid, uid)
    carried(volume / "scratch", text)
    lists = sorted(volume.glob("lists/*"))
    as_user(MALLORY, lambda: os.truncate(volume / f"lists/{MALLORY}.list", 0))
    done, listed = carried(volume / "scratch", text, now_ns=NOW_NS + 9 * DAY_NS // 2)
    assert isinstance(done, RuleDone)
    assert isinstance(listed, PurgeListed)
    assert (done.swept.sums.n_done, listed.error, listed.n_users) == (1, None, 1)
    assert (len(lists), list(volume.glob("lists/*"))) == (2, [volume / f"lists/{ALICE}.list"])


def test_lists_that_can_not_be_had_stop_it_before_anything_is_touched(volume: Path) -> None:
    put(volume / "scratch/a", 40)
    (volume / "lists").mkdir()
    os.chown(volume / "lists", MALLORY, MALLORY)
    with pytest.raises(Refused):
        carried(volume / "scratch", f'{OLD}\npurgelist = {{ directory = "{volume}/lists", ahead = "7d" }}')
    assert files(volume / "scratch") == {"a"}


def test_one_directory_that_fails_keeps_no_other_from_its_turn(volume: Path) -> None:
    for name in ("a", "b", "c"):
        put(volume / f"home/{name}/old-{name}", 40)
    told = carried(volume / "home/*", f'{OLD}\naction = "move"\nmove_to = "{volume}/home/b"')
    assert [type(one) for one in told] == [RuleDone, RuleNotDone, RuleDone]  # nothing is moved from b to b
    assert files(volume / "home") == {"b/old-a", "b/old-b", "b/old-c"}


@pytest.mark.parametrize("unit", ["", 'unit = "top"'])
def test_directory_that_becomes_a_link_meanwhile_leads_nowhere(
    volume: Path, unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(volume / "home/tmp/old", 40)
    put(volume / "secret/tmp/old", 40)

    def replaced(kernel: Kernel, request: Request, wishes: SweepWishes) -> Swept:
        (volume / "home").rename(volume / "elsewhere")
        (volume / "home").symlink_to("secret")
        return run(kernel, request, wishes)

    monkeypatch.setattr("fusefs.plan.run_plan.run", replaced)
    (told,) = carried(volume / "home/tmp", f"{OLD}\n{unit}")
    assert isinstance(told, RuleNotDone)
    assert isinstance(told.error, NotFound)
    assert files(volume) == {"secret/tmp/old", "elsewhere/tmp/old"}


def test_rule_without_a_directory_to_go_to_is_told(volume: Path) -> None:
    (told,) = carried(volume / "none-*", OLD)
    assert isinstance(told, RuleNotDone)
    assert (told.directory, told.why, told.error) == (bytes(volume / "none-*"), "there is no such directory", None)


@pytest.mark.parametrize("runs", [True, False])
def test_another_filesystem_to_go_to_is_refused_with_the_command_that_moves_there(volume: Path, runs: bool) -> None:
    put(volume / "scratch/old", 40)
    put(volume / "scratch/young", 4)
    with tmpfs_volume() as other:
        move = f'{OLD}\ncopy = true\naction = "move"\nmove_to = "{other}"'
        (told,) = carried(volume / "scratch", move, runs=runs)
        assert isinstance(told, RuleNotDone)
        assert told.error is not None
        assert files(volume) == {"scratch/old", "scratch/young"}
        assert in_bash(told.error.hint, volume).code == 0
        assert (files(volume), files(other)) == ({"scratch/young"}, {"old"})


def test_a_unit_that_another_filesystem_should_get_stays(volume: Path) -> None:
    put(volume / "scratch/unit/old", 40)
    with tmpfs_volume() as other:
        (told,) = carried(volume / "scratch", f'{OLD}\nunit = "top"\naction = "move"\nmove_to = "{other}"')
    assert isinstance(told, RuleNotDone)
    assert told.error is not None
    assert told.error.hint == f"rsync -aHAX --remove-source-files {volume}/scratch/NAME {other}/"
    assert files(volume) == {"scratch/unit/old"}


@pytest.mark.parametrize("action", ["delete", "trash"])
def test_empty_directories_go_but_for_those_that_are_locked(volume: Path, action: str) -> None:
    for name in ("a/empty", "locked", "full"):
        (volume / "scratch" / name).mkdir(parents=True)
    put(volume / "scratch/full/file", 40)
    put(volume / "scratch/nothing", 40).write_bytes(b"")
    with locked(volume / "scratch/locked"):
        told = swept(volume / "scratch", f'empty = true\naction = "{action}"')
    left = {str(path.relative_to(volume / "scratch")) for path in (volume / "scratch").rglob("*")}
    assert left - {"a"} == {"locked", "full", "full/file"}  # a is empty now: it may go at once, or the next time
    assert told.spared == (Spared(b"locked", "locked"),)
