"""A plan carried out: it does what it says, leaves alone what other tools do, and nobody leads it elsewhere."""

import errno
import os
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from fusefs.cli.plan import refused_rules
from fusefs.core.errors import BadConfig, NotFound, Refused
from fusefs.core.plan_rules import PlanContext, PurgeListsResult, RuleOutcome, RuleResult, SkippedRule, read_plan
from fusefs.core.record import Failure
from fusefs.core.results import KEPT_BY_OTHERS, LOCKED_BY_OTHERS, LOCKED_BY_UNKNOWN, Spared, Swept
from fusefs.core.toml_reader import Source
from fusefs.linux.kernel import RESTORED_XATTRS, Kernel
from fusefs.plan.run_plan import PlanOptions, carry_out
from fusefs.sweep.request import Request, SweepOptions
from fusefs.sweep.run_sweep import DEFAULT_SWEEP, run_request
from tests.plan.test_run_plan_units import locked
from tests.plan.test_run_plan_units import put as put_at
from tests.support.foreground_mount import trashd_mount
from tests.support.make_trees import snapshot
from tests.support.other_users import as_user, run_as
from tests.support.real_filesystems import bind_mount, tmpfs_volume
from tests.support.run_sweep import give
from tests.support.store_verbs import entries, restore, swap
from tests.support.trashd_command import TRASHD, trashd
from tests.support.tried_pages import in_bash

pytestmark = pytest.mark.needs("root")


ALICE, MALLORY = 12001, 12666
NOW_NS, DAY_NS = 1_700_000_000 * 10**9, 86_400 * 10**9


@pytest.fixture
def volume() -> Iterator[Path]:
    with tmpfs_volume() as path:
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
    wishes: SweepOptions = DEFAULT_SWEEP,
    kernel: Kernel | None = None,
) -> list[RuleOutcome]:
    plan = f'[[rule]]\ndirectory = "{directory}"\n{text}\n'
    rules = read_plan([Source("plan", plan)], PlanContext(now_ns, time.mktime, int, int))
    return list(carry_out(kernel or Kernel(), rules, PlanOptions(runs, now_ns, wishes)))


def swept(directory: Path | str, text: str, *, runs: bool = True) -> Swept:
    (told,) = carried(directory, text, runs=runs)
    assert isinstance(told, RuleResult), told
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
    assert set(told.spared) == {Spared(where, "locked"), Spared(b"c", "contains .trashd-keep")}
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
    told = carried(volume / "scratch", text, wishes=SweepOptions(stops=lambda: True))
    assert not [one for one in told if isinstance(one, PurgeListsResult)]
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
    assert isinstance(told, SkippedRule)
    assert isinstance(told.error, Refused)
    assert f"contains the purge lists in {volume}/by/lists" in told.why
    assert isinstance(listed, PurgeListsResult)
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
    assert isinstance(listed, PurgeListsResult)
    assert (listed.is_whole, listed.n_entries) == (not is_closed, 1 if is_closed else 2)
    (written,) = (volume / "lists").iterdir()
    assert ("# Incomplete" in written.read_text()) == is_closed


def test_lists_say_so_too_if_units_were_left_for_another_time(volume: Path) -> None:
    for name in ("a", "b", "c"):
        put(volume / "scratch" / name, 40)
    text = f'{OLD}\nunit = "top"\nmax_delete = 1\npurgelist = {{ directory = "{volume}/lists", ahead = "7d" }}'
    for runs in (False, True):
        listed = carried(volume / "scratch", text, runs=runs)[-1]
        assert isinstance(listed, PurgeListsResult)
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
    assert isinstance(done, RuleResult)
    assert isinstance(listed, PurgeListsResult)
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
    assert isinstance(done, RuleResult)
    assert isinstance(listed, PurgeListsResult)
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
    assert [type(one) for one in told] == [RuleResult, SkippedRule, RuleResult]  # nothing is moved from b to b
    assert files(volume / "home") == {"b/old-a", "b/old-b", "b/old-c"}


@pytest.mark.parametrize("unit", ["", 'unit = "top"'])
def test_directory_that_becomes_a_link_meanwhile_leads_nowhere(
    volume: Path, unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(volume / "home/tmp/old", 40)
    put(volume / "secret/tmp/old", 40)

    def replaced(kernel: Kernel, request: Request, wishes: SweepOptions) -> Swept:
        (volume / "home").rename(volume / "elsewhere")
        (volume / "home").symlink_to("secret")
        return run_request(kernel, request, wishes)

    monkeypatch.setattr("fusefs.plan.run_plan.run_request", replaced)
    (told,) = carried(volume / "home/tmp", f"{OLD}\n{unit}")
    assert isinstance(told, SkippedRule)
    assert isinstance(told.error, NotFound)
    assert files(volume) == {"secret/tmp/old", "elsewhere/tmp/old"}


def test_rule_without_a_directory_to_go_to_is_told(volume: Path) -> None:
    (told,) = carried(volume / "none-*", OLD)
    assert isinstance(told, SkippedRule)
    assert (told.directory, told.why, told.error) == (bytes(volume / "none-*"), "no such directory", None)


@pytest.mark.parametrize("runs", [True, False])
def test_another_filesystem_to_go_to_is_refused_with_the_command_that_moves_there(volume: Path, runs: bool) -> None:
    put(volume / "scratch/old", 40)
    put(volume / "scratch/young", 4)
    with tmpfs_volume() as other:
        move = f'{OLD}\ncopy = true\naction = "move"\nmove_to = "{other}"'
        (told,) = carried(volume / "scratch", move, runs=runs)
        assert isinstance(told, SkippedRule)
        assert told.error is not None
        assert files(volume) == {"scratch/old", "scratch/young"}
        assert in_bash(told.error.hint, volume).code == 0
        assert (files(volume), files(other)) == ({"scratch/young"}, {"old"})


def test_a_unit_that_another_filesystem_should_get_stays(volume: Path) -> None:
    put(volume / "scratch/unit/old", 40)
    with tmpfs_volume() as other:
        (told,) = carried(volume / "scratch", f'{OLD}\nunit = "top"\naction = "move"\nmove_to = "{other}"')
    assert isinstance(told, SkippedRule)
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


@contextmanager
def listening(path: Path, kind: socket.SocketKind = socket.SOCK_STREAM) -> Iterator[None]:
    """A process listens on it, and it is old. It was bound by a relative path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    before = os.getcwd()
    with socket.socket(socket.AF_UNIX, kind) as bound:
        os.chdir(path.parent)
        try:
            bound.bind(path.name)
        finally:
            os.chdir(before)
        if kind is not socket.SOCK_DGRAM:
            bound.listen()
        age(path)
        yield
        bound.setblocking(False)
        with pytest.raises(BlockingIOError):  # nobody called it, or sent it anything
            bound.recv(1) if kind is socket.SOCK_DGRAM else bound.accept()


def age(path: Path) -> None:
    """Make it sixty days old."""
    os.utime(path, ns=(NOW_NS - 60 * DAY_NS,) * 2, follow_symlinks=False)


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET])
@pytest.mark.parametrize("action", ACTIONS)
def test_a_live_socket_stays_and_a_dead_one_goes(volume: Path, action: str, kind: socket.SocketKind) -> None:
    (volume / "away").mkdir()
    with listening(volume / "s/dead", kind):
        pass
    with listening(volume / "s/tmux/default", kind):
        told = swept(volume / "s", f"{OLD}\n{action.format(volume)}")
    assert told.spared == (Spared(b"tmux/default", "a socket in use"),)
    assert files(volume / "s") == {"tmux/default"}


def test_so_does_the_unit_that_it_is_in(volume: Path) -> None:
    put(volume / "s/job/file", 60)
    with listening(volume / "s/job/agent"):
        told = swept(volume / "s", f'{OLD}\nunit = "top"')
        assert told.spared == (Spared(b"job", "a socket in use"),)
    assert swept(volume / "s", f'{OLD}\nunit = "top"').sums.n_done == 1


def test_a_socket_that_is_live_through_a_mount_stays(volume: Path) -> None:
    (volume / "source/s").mkdir(parents=True)
    with trashd_mount(volume / "source") as mounted, listening(mounted.path / "s/agent"):
        assert swept(volume / "source/s", OLD).spared == (Spared(b"agent", "a socket in use"),)


def test_what_has_the_sticky_bit_is_a_device_or_the_filesystems_own_stays(volume: Path) -> None:
    put(volume / "s/marked", 60).chmod(0o1644)
    os.mknod(volume / "s/pipe", stat.S_IFIFO | 0o1666)
    (volume / "s/pipe").chmod(0o1666)
    os.mknod(volume / "s/null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    for name in ("pipe", "null"):
        age(volume / "s" / name)
    put(volume / "s/aquota.user", 60)
    put(volume / "s/lost+found/#123", 60)
    os.chown(put(volume / "s/theirs/aquota.user", 60), 12001, 12001)
    told = swept(volume / "s", f'{OLD}\naction = "delete"')
    assert set(told.spared) == {
        Spared(b"marked", "its sticky bit is set"), Spared(b"pipe", "its sticky bit is set"),
        Spared(b"null", "a device"), Spared(b"aquota.user", "belongs to the filesystem"),
        Spared(b"lost+found", "belongs to the filesystem"),
    }  # fmt: skip
    assert files(volume / "s") == {"marked", "pipe", "null", "aquota.user", "lost+found/#123"}


def test_a_rule_for_devices_is_a_mistake() -> None:
    with pytest.raises(BadConfig):
        carried("/nowhere", f'{OLD}\ntype = "b"')


ATIME = f'{OLD}\nby = ["atime", "mtime"]'


def refused(where: Path, text: str = ATIME) -> str:
    """Why a rule does nothing there, though it is told to."""
    (told,) = carried(where, text)
    assert isinstance(told, SkippedRule), told
    assert isinstance(told.error, Refused)
    return told.why


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("noatime", ATIME),
        ("noatime", f'{ATIME}\nunit = "top"'),
        ("nodiratime", f'{ATIME}\nempty = true\ntype = "d"'),
        ("relatime", 'older = "12h"\nby = "atime"'),
    ],
)
def test_a_rule_by_access_times_that_are_not_kept_is_refused(option: str, text: str) -> None:
    with tmpfs_volume(options=[option]) as there:
        put(there / "s/old", 60)
        assert option in refused(there / "s", text)
        assert files(there / "s") == {"old"}
        (told,) = carried(there / "s", f"{text}\ntrusts_atime = true")
        assert isinstance(told, RuleResult)


def test_so_it_is_if_another_mount_of_the_disk_does_not_keep_them(volume: Path) -> None:
    put(volume / "s/old", 60)
    with tmpfs_volume() as other:
        (other / "place").mkdir()
        with bind_mount(volume, other / "place", ["noatime"]):
            assert "noatime" in refused(volume / "s")
    assert swept(volume / "s", ATIME).sums.n_done == 1


def test_so_it_is_if_files_are_read_through_a_mount_that_keeps_pages(volume: Path) -> None:
    put(volume / "source/s/old", 60)
    with trashd_mount(volume / "source") as mounted:
        for where in (volume / "source/s", mounted.path / "s"):
            assert "caches their pages" in refused(where)
        assert swept(volume / "source/s", f"{ATIME}\ntrusts_atime = true").sums.n_done == 1


def test_a_sweep_by_access_times_is_refused_alike() -> None:
    with tmpfs_volume(options=["noatime"]) as there:
        put(there / "s/old", 60)
        by_atime = ("sweep", there / "s", "--by", "atime", "--older", "30d")
        done = trashd(*by_atime)
        assert (done.code, done.out) == (Refused.exit_code, "")
        assert "is mounted with noatime" in done.err
        assert files(there / "s") == {"old"}
        assert trashd(*by_atime, "--trust-atime").code == 0
        assert files(there / "s") == set()


def after_a_month(directory: Path, text: str = OLD) -> RuleOutcome:
    """What a rule does a month from now."""
    (told,) = carried(directory, text, now_ns=time.time_ns() + 31 * DAY_NS)
    return told


RESTORED = "restored too recently for the rule's age"


def test_what_was_restored_is_left_alone_for_the_rules_age(volume: Path) -> None:
    put(volume / "s/old", 60)
    os.symlink("old", volume / "s/link")
    age(volume / "s/link")
    assert swept(volume / "s", OLD).sums.n_done == 2
    (entry,) = entries(volume)
    assert restore(volume, entry.id).is_spared
    before = snapshot(volume / "s")
    told = swept(volume / "s", OLD)
    assert (told.sums.n_done, set(told.spared)) == (0, {Spared(b"old", RESTORED), Spared(b"link", RESTORED)})
    assert snapshot(volume / "s") == before
    later = after_a_month(volume / "s")
    assert isinstance(later, RuleResult)
    assert later.swept.sums.n_done == 2


@pytest.mark.parametrize("unit", ["", 'unit = "top"'])
def test_so_is_all_that_a_restored_directory_holds(volume: Path, unit: str) -> None:
    put(volume / "s/job/deep/old", 60)
    put(volume / "s/other/old", 60)
    restore(volume, swap(volume / "s/job").id)
    assert swept(volume / "s", f"{OLD}\n{unit}").sums.n_done == 1
    assert files(volume / "s") == {"job/deep/old"}
    later = after_a_month(volume / "s", f"{OLD}\n{unit}")
    assert isinstance(later, RuleResult)
    assert later.swept.sums.n_done == 1


def test_a_restored_unit_is_on_the_list_before_it_goes(volume: Path) -> None:
    put(volume / "s/job/old", 60)
    restore(volume, swap(volume / "s/job").id)
    text = f'{OLD}\nunit = "top"\npurgelist = {{ directory = "{volume}/lists", ahead = "7d" }}'
    told = carried(volume / "s", text, now_ns=time.time_ns() + 25 * DAY_NS)
    assert files(volume / "s") == {"job/old"}
    assert isinstance(told[-1], PurgeListsResult)
    assert told[-1].n_entries == 1


def test_who_may_write_in_a_directory_cannot_mark_it_for_its_owner(volume: Path) -> None:
    put(volume / "s/team/old", 60)
    (volume / "s/team").chmod(0o775)
    os.setxattr(volume / "s/team", RESTORED_XATTRS[1], b"%d" % time.time_ns())
    assert swept(volume / "s", OLD).sums.n_done == 1


def test_restore_says_whether_rules_leave_it_alone(volume: Path) -> None:
    home = volume / "home"
    put(home / ".config/trashd/plan.d/own.toml", 0)
    for name, mode in (("writable", 0o644), ("fixed", 0o444)):
        put(home / "data" / name, 60).chmod(mode)
    for path in (home, *home.rglob("*")):
        os.chown(path, ALICE, ALICE)
    variables = {"HOME": str(home), "PATH": os.environ["PATH"], "XDG_RUNTIME_DIR": str(home)}

    def alice(*words: str) -> str:
        done = run_as(ALICE, [TRASHD, *words], env=variables)
        assert done.returncode == 0, done
        return os.fsdecode(done.stdout + done.stderr)

    said = {}
    for name in ("writable", "fixed"):
        alice("rm", f"{home}/data/{name}")
        said[name] = alice("restore", f"{home}/data/{name}")
    assert "rules (trashd plan) count the age of these files from this restore" in said["writable"]
    assert "rules (trashd plan) may remove these files again" in said["fixed"]


def test_doctor_tells_of_a_rule_that_is_refused() -> None:
    with tmpfs_volume(options=["noatime"]) as there:
        rules = f'[[rule]]\ndirectory = "{there}"\n{ATIME}\n'
        read = read_plan([Source("plan", rules)], PlanContext(NOW_NS, time.mktime, int, int))
        (problem,) = refused_rules(read, NOW_NS)
        assert "is mounted with noatime" in problem.what
