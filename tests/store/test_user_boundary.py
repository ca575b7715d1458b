"""What root carries across the boundary between users: nothing, by any command, however one of them arranges it."""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path

import pytest

from fusefs.core.container_states import State
from fusefs.core.errors import AcrossUsers, Incomplete, TrashdError
from fusefs.core.plan_rules import PlanContext, PurgeListsResult, RuleOutcome, RuleResult, SkippedRule, read_plan
from fusefs.core.results import NOT_GIVEN, NOT_TAKEN, Swept
from fusefs.core.selection import Selection
from fusefs.core.toml_reader import Source
from fusefs.linux.kernel import Kernel
from fusefs.plan.run_plan import PlanOptions, carry_out
from fusefs.store.swap import Swapped
from fusefs.sweep.request import ActionRequest, Request, ToDelete, ToMove, ToTrash
from fusefs.sweep.run_sweep import run_request
from tests.support import acls
from tests.support.other_users import as_user
from tests.support.real_filesystems import tmpfs_volume
from tests.support.store_verbs import ActingAt, entries, init, place, recover_all, remove, restore, swap
from tests.support.trashd_command import trashd

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
    (told,) = (
        one for one in carried(directory, text, runs=runs, kernel=kernel) if not isinstance(one, PurgeListsResult)
    )
    assert isinstance(told, RuleResult), told
    return told.swept


def sweep(
    directory: Path,
    act: ActionRequest,
    names: Sequence[bytes] | None = None,
    kinds: str = "f",
    kernel: Kernel | None = None,
) -> Swept:
    """A sweep that root types."""
    selection = Selection(types=frozenset(kinds))
    return run_request(kernel or Kernel(), Request(os.fsencode(directory), selection, act, names=names))


def left(told: Swept) -> list[bytes]:
    assert {one.call for one in told.failures} <= {NOT_TAKEN}
    assert told.sums.n_failed == len(told.failures)
    return sorted(one.name for one in told.failures)


# Taking


def test_what_a_mate_moves_under_the_name_of_a_rule_stays_and_is_reported(volume: Path) -> None:
    as_mate(BOB, volume / "team/proj", volume / "scratch/bob/tmp")
    *_, told = carried(volume / "scratch/*/tmp")
    assert isinstance(told, SkippedRule)
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
    with pytest.raises(AcrossUsers, match="leads from one user's directory into another's"):
        sweep(volume / "scratch/bob/proj", ToDelete())
    assert (volume / "scratch/bob/proj/private/thesis").exists()


def test_what_comes_in_the_place_of_a_directory_that_was_seen_stays(volume: Path) -> None:
    own(volume / "scratch/bob/job", ALICE, 0o2775, TEAM)
    own(volume / "scratch/bob/job/private", ALICE)
    for moment in count():
        swept(volume / "scratch/bob")
        swept(volume / "scratch/bob", kernel=Kernel(AtOpening(moment, lambda: exchange(volume))))
        was_exchanged = not (volume / "team/proj").exists()
        assert (volume / ("scratch/bob/job" if was_exchanged else "team/proj") / "private/thesis").exists(), moment
        if not was_exchanged:
            break
        as_mate(BOB, volume / "scratch/bob/job", volume / "team/proj")
        as_mate(BOB, volume / "scratch/bob/away", volume / "scratch/bob/job")
        Path("/var/lib/trashd/plan-directories").unlink(missing_ok=True)
    assert moment > 5


class AtOpening(ActingAt):
    """A hook that does something before something is opened for the n-th time (from 0)."""

    def __call__(self, call: str) -> None:
        if call == "openat2":
            super().__call__(call)


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


# Giving

MOVE = 'older = "30d"\naction = "move"\nmove_to = "{}/archive"\nif_exists = "{}"'


def moved(volume: Path, if_exists: str = "skip", runs: bool = True) -> Swept:
    """What a rule does that moves out of tmp/."""
    own(volume / "archive", 0)
    return swept(volume / "tmp", MOVE.format(volume, if_exists), runs=runs)


def test_move_puts_nothing_into_a_directory_that_another_user_has_there(volume: Path) -> None:
    own(volume / "tmp/results", BOB)
    old_of(volume / "tmp/results/bait", BOB)
    assert moved(volume).sums.n_done == 1
    as_user(BOB, (volume / "tmp/results").rmdir)
    own(volume / "tmp/results", ALICE, 0o700)
    old_of(volume / "tmp/results/data", ALICE, 0o600)
    told = moved(volume)
    assert [(one.name, one.call) for one in told.failures] == [(b"results/data", NOT_GIVEN)]
    assert told.sums.n_failed == 1
    assert (volume / "tmp/results/data").exists()
    assert os.listdir(volume / "archive/results") == ["bait"]


@pytest.mark.parametrize("if_exists", ["skip", "number", "replace"])
@pytest.mark.parametrize("deep", ["", "deep/er/"])
def test_move_neither_replaces_nor_plants_anything_in_another_users_directory(
    volume: Path, if_exists: str, deep: str
) -> None:
    own(volume / "archive", 0)
    own(volume / "archive/results", ALICE, 0o700)
    old_of(volume / "archive/results/data", ALICE)
    own(volume / "tmp/results", BOB)
    for where in (f"{deep}data", f"{deep}more"):
        old(volume / "tmp/results" / where)
    for path in (volume / "tmp/results").rglob("*"):
        os.chown(path, BOB, BOB)
    told = moved(volume, if_exists)
    assert (told.sums.n_done, told.sums.n_failed) == (0, 2)
    assert os.listdir(volume / "archive/results") == ["data"]
    assert (volume / "archive/results/data").stat().st_uid == ALICE


def test_move_replaces_only_what_its_owner_has_there(volume: Path) -> None:
    own(volume / "archive", 0)
    for name, uid in (("hers", ALICE), ("his", BOB)):
        old_of(volume / "tmp" / name, BOB)
        (volume / "archive" / name).write_text("before")
        os.chown(volume / "archive" / name, uid, uid)
    os.utime(volume / "archive/hers")
    time.sleep(0.02)  # what came since the run began is never replaced
    assert left_over(moved(volume, "replace")) == [b"hers"]
    assert (volume / "archive/hers").read_text() == "before"
    assert (volume / "archive/his").read_text() == "content of his"


def left_over(told: Swept) -> list[bytes]:
    return sorted(one.name for one in told.failures)


def test_move_goes_on_from_a_shared_project_to_its_archive_as_long_as_that_is_no_more_open(volume: Path) -> None:
    own(volume / "archive", 0)
    text = MOVE.format(volume, "skip")
    own(volume / "team/proj/data", ALICE, 0o2775, TEAM)
    for number in range(2):
        old_of(volume / f"team/proj/data/{number}", BOB)
        assert swept(volume / "team", text).sums.n_failed == 0
    assert sorted(os.listdir(volume / "archive/proj/data")) == ["0", "1"]
    (volume / "team/proj/data").chmod(0o755)
    old_of(volume / "team/proj/data/2", ALICE)
    assert left_over(swept(volume / "team", text)) == [b"proj/data/2"]
    (volume / "archive/proj/data").chmod(0o755)
    assert left_over(swept(volume / "team", text)) == []


def test_acl_counts_as_much_as_a_mode(volume: Path) -> None:
    own(volume / "tmp/results", ALICE)
    own(volume / "archive", 0)
    own(volume / "archive/results", ALICE)
    named = ((acls.USER_OBJ, 7), (acls.GROUP_OBJ, 5), (acls.MASK, 7), (acls.OTHER, 5))
    by_name = acls.acl(*sorted([(acls.USER, 7, BOB), *((tag, may, acls.NOBODY) for tag, may in named)]))
    os.setxattr(volume / "archive/results", acls.ACCESS, by_name)
    old_of(volume / "tmp/results/data", ALICE)
    assert left_over(moved(volume)) == [b"results/data"]
    (volume / "tmp/results").chmod(0o775)
    assert left_over(moved(volume)) == [b"results/data"]
    os.setxattr(volume / "tmp/results", acls.ACCESS, by_name)
    assert left_over(moved(volume)) == []


@pytest.mark.parametrize(("uid", "mode"), [(BOB, 0o755), (0, 0o2775), (0, 0o777)])
def test_destination_that_others_may_write_in_is_refused_as_a_whole(volume: Path, uid: int, mode: int) -> None:
    own(volume / "away", uid, mode)
    old_of(volume / "tmp/data", ALICE)
    with pytest.raises(AcrossUsers) as caught:
        sweep(volume / "tmp", ToMove(os.fsencode(volume / "away")))
    assert caught.value.exit_code == 13
    assert (volume / "tmp/data").exists()
    own(volume / "away", 0, 0o1777)
    assert sweep(volume / "tmp", ToMove(os.fsencode(volume / "away"))).sums.n_done == 1


def trashed(directory: Path) -> str:
    orphan = swept(directory, 'older = "30d"').orphan
    assert orphan is not None
    return str(orphan)


@pytest.mark.parametrize("inside", [None, "cache/lib/json.py", "cache/lib", "cache"])
def test_restore_of_a_sweep_plants_nothing_in_another_users_directory(volume: Path, inside: str | None) -> None:
    own(volume / "tmp/cache", BOB)
    own(volume / "tmp/cache/lib", BOB)
    old_of(volume / "tmp/cache/lib/json.py", BOB)
    old_of(volume / "tmp/other", BOB)
    orphan = trashed(volume / "tmp")
    for where in ("tmp/cache/lib", "tmp/cache"):
        as_user(BOB, (volume / where).rmdir)
    own(volume / "tmp/cache", ALICE, 0o700)
    own(volume / "tmp/cache/lib", ALICE)
    assert (restored(volume, orphan, inside), os.listdir(volume / "tmp/cache/lib")) == (13, [])
    assert (volume / "tmp/other").exists() is (inside is None)
    (volume / "tmp/cache/lib").rmdir()
    (volume / "tmp/cache").rmdir()
    assert restored(volume, orphan, inside) == 0
    assert (volume / "tmp/cache/lib/json.py").stat().st_uid == BOB


def restored(volume: Path, orphan: str, inside: str | None = None, to: Path | None = None) -> int:
    """The exit code of root's `trashd restore`."""
    try:
        done = restore(volume, orphan, inside=None if inside is None else os.fsencode(inside), to=to)
    except TrashdError as error:
        return error.exit_code
    return Incomplete.exit_code if done.n_left else 0


def test_sweep_of_a_shared_project_comes_back_where_nothing_was_exchanged(volume: Path) -> None:
    own(volume / "team/proj/data", ALICE, 0o2775, TEAM)
    old_of(volume / "team/proj/data/notes", BOB)
    old_of(volume / "team/proj/top", BOB)
    (volume / "team/proj/data/young").write_text("in daily use")
    orphan = trashed(volume / "team")
    (volume / "team").chmod(0o755)  # it is the very one
    assert restored(volume, orphan) == 0
    assert (volume / "team/proj/data/notes").exists()


def test_restore_plants_nothing_in_a_closed_directory_that_came_in_the_place_of_an_open_one(volume: Path) -> None:
    own(volume / "team/proj/hooks", ALICE, 0o2775, TEAM)
    old_of(volume / "team/proj/hooks/pre-commit", BOB, 0o755)
    orphan = trashed(volume / "team")
    as_mate(BOB, volume / "team/proj/hooks", volume / "team/proj/other")
    as_mate(BOB, volume / "team/proj/private", volume / "team/proj/hooks")
    assert restored(volume, orphan) == 13
    assert os.listdir(volume / "team/proj/hooks") == []  # the old thesis is in the orphan, too


@pytest.mark.parametrize("inside", ["lib/json.py", "lib"])
def test_part_of_roots_swap_comes_into_no_directory_of_another_user(volume: Path, inside: str) -> None:
    own(volume / "tmp/cache", BOB)
    own(volume / "tmp/cache/lib", BOB)
    old_of(volume / "tmp/cache/lib/json.py", BOB)
    orphan = str(swap(volume / "tmp/cache").id)
    as_user(BOB, (volume / "tmp/cache").rmdir)
    own(volume / "tmp/cache", ALICE, 0o700)
    assert restored(volume, orphan, inside) == 13
    assert os.listdir(volume / "tmp/cache") == []
    (volume / "tmp/cache").rmdir()
    assert restored(volume, orphan, inside) == 0
    assert (volume / "tmp/cache/lib").stat().st_uid == (volume / "tmp/cache").stat().st_uid == BOB


def test_part_of_roots_swap_comes_back_into_its_own_fresh_directory_however_open(volume: Path) -> None:
    orphan = str(swap(volume / "team/proj").id)
    assert restored(volume, orphan, "private/thesis") == 0
    assert restored(volume, orphan) == 0


@pytest.mark.parametrize("verb", [swap, remove])
def test_whole_orphan_of_roots_comes_into_no_directory_of_another_user(
    volume: Path, verb: Callable[[Path], Swapped]
) -> None:
    own(volume / "team/proj/job", BOB)
    orphan = str(verb(volume / "team/proj/job").id)
    as_mate(BOB, volume / "team/proj", volume / "team/away")
    own(volume / "team/proj", ALICE, 0o700)
    assert restored(volume, orphan) == 13
    assert os.listdir(volume / "team/proj") == []
    assert entries(volume)[0].state is State.ORPHANS
    (volume / "team/proj").rmdir()
    as_mate(BOB, volume / "team/away", volume / "team/proj")
    assert restored(volume, orphan) == 0
    assert (volume / "team/proj/job").stat().st_uid == BOB


def test_quarantined_orphan_comes_into_no_directory_of_another_user(volume: Path) -> None:
    own(volume / "tmp/cache", BOB)
    own(volume / "tmp/cache/job", BOB)
    old_of(volume / "tmp/cache/job/file", BOB)
    orphan = str(remove(volume / "tmp/cache/job").id)
    container = place(volume, orphan)
    container.rename(container.parents[1] / "quarantine" / container.name)
    as_user(BOB, (volume / "tmp/cache").rmdir)
    own(volume / "tmp/cache", ALICE)
    assert restored(volume, orphan) == 13
    assert entries(volume)[0].state is not State.RESTORING
    assert os.listdir(volume / "tmp/cache") == []
    assert restored(volume, orphan, to=volume / "tmp/back") == 0


def test_to_leads_into_no_directory_of_a_third_user(volume: Path) -> None:
    own(volume / "tmp/job", BOB)
    roots = str(remove(volume / "tmp/job").id)
    old_of(volume / "scratch/bob/file", BOB)
    his = as_user(BOB, lambda: str(remove(volume / "scratch/bob/file").id))
    own(volume / "open", 0, 0o777)
    own(volume / "etc", 0)
    (volume / "scratch/bob/link").symlink_to(volume / "etc")
    os.chown(volume / "scratch/bob/link", BOB, BOB, follow_symlinks=False)
    for where in ("scratch/alice/x", "team/proj/x", "open/x", "scratch/bob/link/x"):
        for orphan in (roots, his):
            assert restored(volume, orphan, to=volume / where) == 13, where
            assert not (volume / where).exists()
    assert restored(volume, roots, to=volume / "scratch/bob/x") == 0
    assert restored(volume, his, to=volume / "tmp/x") == 0


def test_part_of_roots_orphan_goes_to_no_directory_of_a_third_user(volume: Path) -> None:
    own(volume / "tmp/job", BOB)
    old_of(volume / "tmp/job/file", BOB)
    orphan = str(swap(volume / "tmp/job").id)
    assert restored(volume, orphan, "file", volume / "scratch/alice/file") == 13
    assert restored(volume, orphan, "file", volume / "scratch/bob/file") == 0


def test_dropped_directory_goes_to_no_directory_of_a_third_user(volume: Path) -> None:
    own(volume / "tmp/job", BOB)
    remove(volume / "tmp/job")  # root's folder is there now
    drop = next((volume / ".trashd/u/0").glob("drop"))
    own(volume / "tmp/job", BOB)
    (volume / "tmp/job").rename(drop / "job")
    recover_all(volume)
    orphan = next(entry.id for entry in entries(volume) if entry.origin is None)
    assert restored(volume, orphan, to=volume / "scratch/alice/job") == 13
    assert restored(volume, orphan, to=volume / "scratch/bob/job") == 0


def test_users_own_restore_knows_no_boundary_but_the_kernels(volume: Path) -> None:
    own(volume / "team/proj/job", BOB, 0o2775, TEAM)

    def act() -> int:
        orphan = str(remove(volume / "team/proj/job").id)
        return restored(volume, orphan, to=volume / "team/proj/back")

    assert as_user(BOB, act, groups=(TEAM,)) == 0


def test_commands_say_what_stays_and_why_and_end_with_13(volume: Path) -> None:
    own(volume / "archive", 0)
    own(volume / "archive/results", BOB)
    own(volume / "tmp/results", ALICE, 0o700)
    old_of(volume / "tmp/results/data", ALICE, 0o600)
    own(volume / "tmp/results/bob", BOB)
    old_of(volume / "tmp/results/bob/data", BOB)
    plan = volume / "plan.toml"
    plan.write_text(f'[[rule]]\ndirectory = "{volume}/tmp"\n{MOVE.format(volume, "skip")}\n')
    done = trashd("plan", "apply", plan)
    assert (done.code, done.err) == (13, "")
    assert f"skipped: results/data ({NOT_GIVEN})" in done.out
    assert f"skipped: results/bob ({NOT_TAKEN})" in done.out
    refused = trashd("sweep", "--older", "30d", "--delete", volume / "tmp/results/bob")
    assert (refused.code, refused.out) == (13, "")
    assert "the path leads from one user's directory into another's" in refused.err
    orphan = trashed(volume / "tmp")
    shutil.rmtree(volume / "tmp/results")
    own(volume / "tmp/results", BOB)
    back = trashd("restore", orphan, "--volume", volume)
    assert back.code == 13
    assert f"  results: {NOT_GIVEN}" in back.out
