"""What came into an orphan after the swap was not given: the reaper leaves it.

Each mate does the same to a twin tree in the open: what that mate can't delete there, a reap does not delete.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from fusefs.core.container_states import State
from fusefs.core.names import ContainerId
from fusefs.core.pacing import Speed
from fusefs.core.results import LATE_ARRIVAL, Reaped
from fusefs.core.selection import Selection
from fusefs.engine.pace import ConstantSpeed
from fusefs.linux.kernel import Kernel
from fusefs.reaper.reap import RemovalOptions, reap
from fusefs.service.open_volume import open_volume
from fusefs.service.orphan_schedule import RootTakeover
from fusefs.service.work_session import take_over
from fusefs.store.backing_and_mount import BackingAndMount
from fusefs.store.layout import open_store
from fusefs.store.swap import open_own_folder
from fusefs.sweep.request import TakingBoundary, ToTrash
from tests.support.make_trees import File, deep_chain, make_tree
from tests.support.other_users import as_user
from tests.support.real_filesystems import btrfs_subvolume
from tests.support.reap_process import state_of
from tests.support.run_sweep import sweep
from tests.support.shared_memory_children import code_of_child
from tests.support.small_orphans import command
from tests.support.store_verbs import (
    DyingAt,
    entries,
    folder_of,
    forge,
    own,
    place,
    raw,
    recover_all,
)
from tests.support.team_trees import (
    ALICE,
    BOB,
    DEEP,
    FILESYSTEMS,
    MATE,
    TEAM,
    THESIS,
    WayIn,
    as_asker,
    closed,
    job,
    make_project,
    move_in,
    reap_as,
    reap_with_thesis,
    remove_what_he_can,
    results,
    shared,
    swap_as,
    team_volume,
    tick,
    way_into,
)

pytestmark = pytest.mark.needs("root")

SLOWLY = ConstantSpeed(Speed(entries_per_s=1))


@pytest.fixture(params=FILESYSTEMS)
def volume(request: pytest.FixtureRequest) -> Iterator[Path]:
    with team_volume(request.param) as path:
        yield path


@pytest.fixture
def quick_volume() -> Iterator[Path]:
    """The team's volume on tmpfs, for laws that do not depend on the filesystem."""
    with team_volume() as path:
        yield path


def thesis_in(volume: Path, identifier: str, where: str = "tree/in") -> Path:
    return place(volume, identifier) / where / DEEP


def came_in(reaped: Reaped) -> list[bytes]:
    """What a reap left because it came in later."""
    return sorted(failure.name for failure in reaped.report.failures if failure.call == LATE_ARRIVAL)


def twin_survives(project: Path) -> bool:
    """Whether the mate, who moved the twin's results and removes all that is possible, leaves the thesis."""
    with way_into(project / "twin-job/in") as fd:
        move_in(project / "twin-results", fd)
    remove_what_he_can(project / "twin-job")
    return (project / "twin-job/in" / DEEP).exists()


# What the judgement rests on


def test_a_move_shows_in_the_ctime_of_the_directory_that_was_moved(volume: Path) -> None:
    make_tree(volume / "a", {"b": {"c": {}}})
    tick(volume)
    before = (volume / "a/b").stat().st_ctime_ns
    inside = (volume / "a/b/c").stat().st_ctime_ns
    (volume / "a/b").rename(volume / "project/b")
    assert (volume / "project/b").stat().st_ctime_ns > before
    assert (volume / "project/b/c").stat().st_ctime_ns == inside


# Who has a way in


@pytest.mark.parametrize("way", WayIn)
@pytest.mark.parametrize("asker", [ALICE, 0])
def test_what_a_mate_moved_into_an_orphan_is_kept(volume: Path, asker: int, way: WayIn) -> None:
    identifier, reaped = reap_with_thesis(volume, asker, way=way)
    assert twin_survives(volume / "project")
    assert thesis_in(volume, identifier).read_bytes() == THESIS
    assert came_in(reaped) == [b"tree/in"]
    assert state_of(volume, identifier) is State.QUARANTINE
    assert [str(p.relative_to(place(volume, identifier))) for p in place(volume, identifier).glob("tree/*")] == [
        "tree/in"
    ]


def test_what_was_there_goes_although_a_mate_owns_it(volume: Path) -> None:
    """Directories of two owners, writable by the team, that were not touched."""
    project = make_project(volume)
    for asker, name in ((ALICE, "job"), (0, "twin-job")):
        identifier = swap_as(asker, project / name)
        reaped = reap_as(asker, volume, identifier)
        assert (reaped.report.failures, state_of(volume, identifier)) == ((), None)


def test_what_is_moved_into_the_quarantine_is_kept(quick_volume: Path) -> None:
    project = make_project(quick_volume)
    with way_into(project / "job") as top, way_into(project / "job/in") as fd:
        identifier = swap_as(ALICE, project / "job")
        move_in(project / "results", fd)
        reap_as(ALICE, quick_volume, identifier)
        move_in(project / "twin-results", top)
        reaped = reap_as(ALICE, quick_volume, identifier)
    assert came_in(reaped) == [b"tree/in", b"tree/results"]
    for where in ("tree", "tree/in"):
        assert thesis_in(quick_volume, identifier, where).read_bytes() == THESIS


def test_what_comes_back_with_more_in_it_is_kept(quick_volume: Path) -> None:
    """It was there at the swap; out in the open its owner put something into it, and then it came in again."""
    project = make_project(quick_volume)
    with way_into(project / "job") as fd:
        identifier = swap_as(ALICE, project / "job")
        as_user(MATE, lambda: os.rename("in", project / "in", src_dir_fd=fd), groups=[TEAM])
        as_user(ALICE, lambda: make_tree(project / "in/results", results()), groups=[TEAM])
        as_user(MATE, lambda: os.rename(project / "in", "in", dst_dir_fd=fd), groups=[TEAM])
        reap_as(ALICE, quick_volume, identifier)
    assert thesis_in(quick_volume, identifier).read_bytes() == THESIS


def test_an_empty_directory_goes_whoever_moved_it(quick_volume: Path) -> None:
    """Who can move it can remove it."""
    project = make_project(quick_volume)
    make_tree(project / "empty", shared({}, BOB))
    with way_into(project / "job") as fd:
        identifier = swap_as(0, project / "job")
        move_in(project / "empty", fd)
        assert reap_as(0, quick_volume, identifier).report.failures == ()


@pytest.mark.parametrize("mode", [0o070, 0o2370])
def test_a_mode_that_keeps_its_owner_out_opens_nothing(quick_volume: Path, mode: int) -> None:
    """The reaper gives its user what a mode forbids, but not where it is in doubt."""
    identifier, _reaped = reap_with_thesis(quick_volume, first=lambda project: (project / "results").chmod(mode))
    assert thesis_in(quick_volume, identifier).read_bytes() == THESIS
    assert thesis_in(quick_volume, identifier).parents[1].stat().st_mode & 0o7777 == mode


def test_an_access_list_lets_others_move_it(quick_volume: Path) -> None:
    def give_way(project: Path) -> None:
        (project / "results").chmod(0o700)
        subprocess.run(["setfacl", "-m", f"u:{MATE}:rwx", project / "results"], check=True)

    identifier, _reaped = reap_with_thesis(quick_volume, first=give_way)
    assert thesis_in(quick_volume, identifier).read_bytes() == THESIS


# Other ways into the store


def test_what_came_into_something_dropped_is_kept(quick_volume: Path) -> None:
    project = make_project(quick_volume)
    with way_into(project / "job/in") as fd:
        as_user(ALICE, lambda: swap_nothing(quick_volume), groups=[TEAM])
        drop = folder_of(quick_volume, ALICE) / "drop"
        as_user(ALICE, lambda: (project / "job").rename(drop / "job"), groups=[TEAM])
        as_user(ALICE, lambda: swap_nothing(quick_volume), groups=[TEAM])
        [entry] = entries(quick_volume)
        move_in(project / "results", fd)
        reap_as(ALICE, quick_volume, entry.id)
    assert thesis_in(quick_volume, entry.id).read_bytes() == THESIS


def swap_nothing(volume: Path) -> None:
    """What any command does first: folders made, drops taken in."""
    with own(volume):
        pass
    recover_all(volume)


def test_what_came_into_what_a_sweep_took_is_kept(volume: Path) -> None:
    """What was not touched goes, although a mate may write in it and the sweep has moved it."""
    project = make_project(volume)
    for fresh in ("other", "job"):
        with way_into(project / "job/in") as fd:
            if fresh == "other":
                make_tree(project / "other", job(BOB))
                tick(volume)
            chosen = Selection(names=(fresh,), types=frozenset("d"))
            swept = sweep(project, chosen, ToTrash(), boundary=TakingBoundary(0, is_judged=True))
            assert swept.orphan is not None
            if fresh == "job":
                move_in(project / "results", fd)
            reaped = reap_as(0, volume, swept.orphan)
        assert came_in(reaped) == ([b"tree/job/in"] if fresh == "job" else [])
    assert swept.orphan is not None
    assert thesis_in(volume, swept.orphan, "tree/job/in").read_bytes() == THESIS


def test_root_that_takes_it_over_deletes_nothing_of_a_third_that_came_in(volume: Path) -> None:
    """Of Alice's it deletes all that is hers, and what of others was there at the swap."""
    project = make_project(volume)
    make_tree(project / "bobs", results(BOB))
    make_tree(project / "job/others", closed({"more": closed({"file": "b"}, BOB)}, BOB))
    tick(volume)
    with way_into(project / "job") as fd:
        identifier = swap_as(ALICE, project / "job")
        move_in(project / "bobs", fd)
        reap_as(ALICE, volume, identifier)
    assert command(volume, "reap", "--force", "--yes", identifier) == 13
    [entry] = entries(volume)
    assert entry.uid == 0
    assert [failure.name for failure in entry.failures] == [b"tree/tree/bobs"]
    assert os.listdir(place(volume, entry.id) / "tree/tree") == ["bobs"]
    assert (place(volume, entry.id) / "tree/tree/bobs/chapters/thesis").read_bytes() == THESIS


def test_the_service_with_all_of_roots_right_deletes_nothing_of_a_third_that_came_in(quick_volume: Path) -> None:
    project = make_project(quick_volume)
    make_tree(project / "job/others", closed({"file": "b"}, BOB))
    tick(quick_volume)
    with way_into(project / "job") as fd:
        identifier = swap_as(ALICE, project / "job")
        move_in(project / "results", fd)
        reap_as(ALICE, quick_volume, identifier)
    with open_volume(Kernel(), raw(quick_volume)) as held:
        assert ALICE in held.users().inos  # as the service, which first looks who is there
        taken = take_over(
            held, RootTakeover(ALICE, raw(quick_volume / ".trashd"), ContainerId(identifier), by_force=True)
        )
    assert taken is not None
    reaped = reap_as(0, quick_volume, taken)
    assert came_in(reaped) == [b"tree/tree/results"]
    assert (place(quick_volume, taken) / "tree/tree/results/chapters/thesis").read_bytes() == THESIS


# The word of who asked


@pytest.mark.parametrize("asker", [ALICE, 0])
def test_its_owner_deletes_it_by_his_own_word(quick_volume: Path, asker: int) -> None:
    identifier, _reaped = reap_with_thesis(quick_volume, asker)
    assert as_asker(asker, partial(command, quick_volume, "reap", identifier)) == 13
    assert as_asker(asker, partial(command, quick_volume, "reap", "--force", "--yes", identifier)) == 0
    assert entries(quick_volume) == []


def test_the_list_says_why_and_what_to_do(quick_volume: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reap_with_thesis(quick_volume, 0)
    command(quick_volume, "list")
    output = capsys.readouterr().out
    assert "tree/in: it was moved in or changed after the swap" in output
    assert "trashd reap --force ID" in output


# Writers that go on


def test_a_writer_in_directories_of_the_askers_alone_hinders_nothing(volume: Path) -> None:
    """However often they change: no other user can have moved them."""
    make_tree(volume / "logs", closed({"app": closed({"old": "1"}), "today": closed({})}))
    tick(volume)
    with way_into(volume / "logs/app") as fd:
        (volume / "logs").chmod(0o755)
        os.chown(volume, ALICE, ALICE)
        identifier = swap_as(ALICE, volume / "logs")
        as_user(ALICE, partial(os.mkdir, "new", dir_fd=fd))
        assert reap_as(ALICE, volume, identifier).report.failures == ()


def test_a_directory_that_a_daemon_goes_on_writing_in_is_left_in_roots_orphan(quick_volume: Path) -> None:
    """It might have been moved in by that daemon, with what it can't delete."""
    make_tree(quick_volume / "logs", {"app": closed({"old": "1"}, BOB), "kernel": {"log": "1"}})
    tick(quick_volume)
    with way_into(quick_volume / "logs/app") as fd:
        identifier = swap_as(0, quick_volume / "logs")
        as_user(BOB, lambda: os.mknod("log", 0o600, dir_fd=fd))
        reaped = reap_as(0, quick_volume, identifier)
    assert came_in(reaped) == [b"tree/app"]
    assert os.listdir(place(quick_volume, identifier) / "tree") == ["app"]


# Depth


@pytest.mark.parametrize("asker", [ALICE, 0])
def test_a_deep_tree_that_a_team_may_write_in_goes_whole(volume: Path, asker: int) -> None:
    """Deeper than fds reach: what is renamed up by the reaper did not come in."""
    project = make_project(volume)
    deep_team_tree(project / "deep", 700)
    tick(volume)
    identifier = swap_as(asker, project / "deep")
    reaped = reap_as(asker, volume, identifier)
    assert (reaped.report.failures, state_of(volume, identifier)) == ((), None)


def deep_team_tree(path: Path, n_levels: int) -> None:
    """A chain of directories of Alice's that the team may write in."""
    make_tree(path, shared({}))
    deep_chain(path / "chain", n_levels)
    for _where, _names, _files, fd in os.fwalk(path / "chain"):
        os.fchown(fd, ALICE, TEAM)
        os.fchmod(fd, 0o2775)


def test_what_came_in_deep_down_is_kept(quick_volume: Path) -> None:
    """Deeper than fds reach, too, and through what the reaper renames up."""
    project = make_project(quick_volume)
    deep_team_tree(project / "deep", 300)
    tick(quick_volume)
    with way_into(project / "deep" / "chain" / "/".join(["d"] * 300)) as fd:
        identifier = swap_as(ALICE, project / "deep")
        move_in(project / "results", fd)
        reap_as(ALICE, quick_volume, identifier)
    [thesis] = [path for path in map(Path, files_below(place(quick_volume, identifier))) if path.name == "thesis"]
    assert thesis.read_bytes() == THESIS


def files_below(top: Path) -> list[str]:
    return [os.path.join(where, name) for where, _directories, files in os.walk(top) for name in files]


# Subvolumes


def test_a_snapshot_in_the_orphan_is_no_gift() -> None:
    """It has the ctimes of what it is one of; users make one of their own, with directories of others in it."""
    with team_volume("btrfs") as volume:
        source = btrfs_subvolume(volume / "project", "source")
        make_tree(source / "results", results())
        os.chown(source, MATE, TEAM)
        project = make_project(volume)
        identifier = swap_as(ALICE, project / "job")
        snapshot = place(volume, identifier) / "tree/snapshot"
        subprocess.run(["btrfs", "subvolume", "snapshot", source, snapshot], check=True, capture_output=True)
        assert snapshot.stat().st_uid == MATE
        reaped = reap_as(ALICE, volume, identifier)
        assert came_in(reaped) == [b"tree/snapshot"]
        assert thesis_in(volume, identifier, "tree/snapshot").read_bytes() == THESIS


# Interruptions


def parked(asker: int, volume: Path, identifier: str, n_slices: int) -> Reaped:
    """A reap in small slices that is told to stop after some."""
    asked = iter(range(n_slices))
    wishes = RemovalOptions(n_workers=1, pace=SLOWLY, stops=lambda: next(asked, None) is None)
    return reap_as(asker, volume, identifier, wishes)


@pytest.mark.parametrize("asker", [ALICE, 0])
def test_a_reap_that_is_stopped_again_and_again_ends_in_no_doubt(volume: Path, asker: int) -> None:
    """Its own changes are no reason for one, in directories of others neither."""
    project = make_project(volume)
    identifier = swap_as(asker, project / "job")
    for n in range(1, 60):
        reaped = parked(asker, volume, identifier, n)
        if not reaped.report.stopped:
            break
    assert n > 2
    assert (reaped.report.failures, state_of(volume, identifier)) == ((), None)


def stopped_in_bobs(volume: Path, project: Path) -> str:
    """The id of an orphan of Alice's whose reap was stopped in the middle of a directory of Bob's."""
    make_tree(project / "mixed", shared({"bobs": shared({f"f{n}": "" for n in range(3000)}, BOB)}))
    tick(volume)
    identifier = swap_as(ALICE, project / "mixed")
    names: list[str] = []

    def stops() -> bool:
        names[:] = os.listdir(folder_of(volume, ALICE) / f"reaping/{identifier}/tree/bobs")
        return len(names) < 3000

    pace = ConstantSpeed(Speed(entries_per_s=10_000))
    reaped = reap_as(ALICE, volume, identifier, RemovalOptions(n_workers=1, pace=pace, stops=stops))
    assert reaped.report.stopped
    assert 0 < len(os.listdir(place(volume, identifier) / "tree/bobs")) < 3000
    return identifier


def test_a_directory_of_anothers_that_a_reap_was_stopped_in_is_in_no_doubt(volume: Path) -> None:
    identifier = stopped_in_bobs(volume, volume / "project")
    assert reap_as(ALICE, volume, identifier).report.failures == ()


def test_it_is_if_it_went_out_and_came_back_meanwhile(volume: Path) -> None:
    """In the open its other users went on with it."""
    project = volume / "project"
    make_tree(project / "mine", closed({"thesis": File(THESIS, owner=(ALICE, ALICE))}))
    identifier = stopped_in_bobs(volume, project)
    with way_into(place(volume, identifier) / "tree") as fd:
        as_user(MATE, lambda: os.rename("bobs", project / "bobs", src_dir_fd=fd), groups=[TEAM])
        as_user(ALICE, lambda: os.rename(project / "mine", project / "bobs/mine"), groups=[TEAM])
        as_user(MATE, lambda: os.rename(project / "bobs", "bobs", dst_dir_fd=fd), groups=[TEAM])
    assert came_in(reap_as(ALICE, volume, identifier)) == [b"tree/bobs"]
    assert (place(volume, identifier) / "tree/bobs/mine/thesis").read_bytes() == THESIS


@pytest.mark.parametrize("asker", [ALICE, 0])
def test_what_comes_in_between_two_parts_of_a_reap_is_kept(quick_volume: Path, asker: int) -> None:
    project = make_project(quick_volume)
    with way_into(project / "job") as fd:
        identifier = swap_as(asker, project / "job")
        assert parked(asker, quick_volume, identifier, 2).report.stopped
        move_in(project / "results", fd)
        reap_as(asker, quick_volume, identifier)
    assert thesis_in(quick_volume, identifier, "tree").read_bytes() == THESIS


@pytest.mark.parametrize("asker", [ALICE, 0])
def test_a_reap_that_is_killed_before_any_call_leaves_no_doubt(quick_volume: Path, asker: int) -> None:
    """In directories of the asker's; in root's orphans in those of one other alone too: what it enters it takes."""
    for n in range(0, 1000, 2):
        make_tree(
            quick_volume / "project/killed",
            closed({"a": closed({"b": "1"}, BOB), "c": "2"}, BOB)
            if asker == 0
            else shared({"a": shared({"b": "1"}), "c": "2"}),
        )
        tick(quick_volume)
        identifier = swap_as(asker, quick_volume / "project/killed")
        (quick_volume / "project/killed").rmdir()
        was_killed = reap_and_die(asker, quick_volume, identifier, n)
        recover_all(quick_volume)
        if state_of(quick_volume, identifier) is not None:
            assert reap_as(asker, quick_volume, identifier).report.failures == (), n
        if not was_killed:
            return


def reap_and_die(asker: int, volume: Path, identifier: str, n: int) -> bool:
    """A user reaps an orphan and is killed before the n-th call; whether that happened."""

    def act() -> None:
        kernel = Kernel(DyingAt(n))
        store = open_store(kernel, BackingAndMount(kernel.open_path(raw(volume))), raw(volume))
        assert store is not None
        with store, open_own_folder(store) as folder:
            reap(folder, ContainerId(identifier), RemovalOptions(n_workers=1))

    die = partial(code_of_child, act)
    return bool(as_user(asker, die, groups=[TEAM]) if asker else die())


# Clocks


def test_a_clock_that_was_set_back_since_hides_nothing(quick_volume: Path) -> None:
    """What the record tells of its own time is an hour later than it was: as if the clock had been set back since."""
    hour_ns = 3600 * 1_000_000_000
    project = make_project(quick_volume)
    with way_into(project / "job/in") as fd:
        identifier = swap_as(ALICE, project / "job")
        path = place(quick_volume, identifier) / "record.json"
        fields = json.loads(path.read_bytes())
        later = {key: fields[key] + hour_ns for key in ("moved_ns", "created_ns")}
        forge(path, **later, boot_ns=fields["boot_ns"])
        move_in(project / "results", fd)
        reap_as(ALICE, quick_volume, identifier)
    assert thesis_in(quick_volume, identifier).read_bytes() == THESIS


def test_without_a_time_in_its_record_a_container_has_its_birth(volume: Path) -> None:
    """An orphan of an older version: what was not touched goes, what came in stays."""
    project = make_project(volume)
    with way_into(project / "job/in") as fd:
        identifier = swap_as(ALICE, project / "job")
        path = place(volume, identifier) / "record.json"
        fields = json.loads(path.read_bytes())
        path.write_text(json.dumps({key: value for key, value in fields.items() if key not in ("moved_ns", "boot_ns")}))
        move_in(project / "results", fd)
        reaped = reap_as(ALICE, volume, identifier)
    assert came_in(reaped) == [b"tree/in"]
    assert os.listdir(place(volume, identifier) / "tree") == ["in"]
