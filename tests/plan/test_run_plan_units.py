"""A plan's parts: which directories a pattern means, how old a unit is, and what is left alone."""

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from fusefs.core.plan_rules import RuleAge
from fusefs.core.results import ReportedMark, Spared
from fusefs.core.selection import KINDS, Field, Matcher, Selection
from fusefs.linux.kernel import Kernel
from fusefs.plan.keep_protection import KEPT, LOCKED, Locking, why_locked, why_spared
from fusefs.plan.units import MOUNTED, Judged, Unit, Young, judge_units
from fusefs.store.backing_and_mount import BackingAndMount
from fusefs.store.walk import DeepOpeners
from fusefs.sweep.open_directories import MatchedDirectory, SkippedDirectory, find_directories
from fusefs.sweep.request import Action, ActionPlace, ActionResult
from tests.support.real_filesystems import tmpfs_over

KERNEL = Kernel()
MALLORY = 12666
OLD_NS, NOW_NS = 10**18, 10**18 + 10**15
_AGE = RuleAge(("mtime",), OLD_NS + 1)
needs_root = pytest.mark.needs("root")


def put(path: Path, time_ns: int = OLD_NS, content: bytes = b"content") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, ns=(time_ns, time_ns))
    return path


@contextmanager
def locked(path: Path, how: int = fcntl.LOCK_SH) -> Iterator[None]:
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, how)
        yield
    finally:
        os.close(fd)


# Which directories a pattern means.


def meant(pattern: Path | str) -> list[bytes]:
    return [
        found.path for found in find_directories(KERNEL, os.fsencode(pattern)) if isinstance(found, MatchedDirectory)
    ]


def passed(pattern: Path | str) -> list[SkippedDirectory]:
    return [found for found in find_directories(KERNEL, os.fsencode(pattern)) if isinstance(found, SkippedDirectory)]


def test_pattern_means_what_a_shell_means(tmp_path: Path) -> None:
    for name in ("b/tmp", "a/tmp", ".hidden/tmp", "[x]/tmp", "c/other"):
        (tmp_path / name).mkdir(parents=True)
    put(tmp_path / "file")
    for pattern in ("*", "*/tmp", "?/tmp", ".*/tmp", "[ab]/t*", "\\[x]/tmp"):
        wanted = sorted(map(str, tmp_path.glob(pattern.replace("\\[", "[[]"))))
        told = [os.fsdecode(path) for path in meant(tmp_path / pattern)]
        hidden = not pattern.startswith(".")
        assert told == [path for path in wanted if os.path.isdir(path) and not (hidden and "/.hidden" in path)]


def test_directory_that_is_not_there_is_told(tmp_path: Path) -> None:
    assert passed(tmp_path / "none/x") == [SkippedDirectory(bytes(tmp_path / "none"), "No such file or directory")]
    assert list(find_directories(KERNEL, bytes(tmp_path / "none*"))) == []


def test_store_is_no_directory_for_a_rule(tmp_path: Path) -> None:
    (tmp_path / ".trashd/u").mkdir(parents=True)
    assert meant(tmp_path / ".*") == meant(tmp_path / ".trashd/u") == []


@needs_root
def test_link_that_a_user_can_change_is_not_followed(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "target/tmp").mkdir(parents=True)
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, MALLORY, MALLORY)
    (home / "tmp").symlink_to(tmp_path / "target/tmp")
    assert meant(tmp_path / "*/tmp") == [bytes(tmp_path / "target/tmp")]
    assert "not followed" in passed(tmp_path / "home/tmp")[0].why


@pytest.mark.parametrize("target", ["{}/target", "target", "../{name}/./target"])
def test_link_of_ones_own_is_followed(tmp_path: Path, target: str) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "target/[sub]").mkdir(parents=True)
    (tmp_path / "link").symlink_to(target.format(tmp_path, name=tmp_path.name))
    assert meant(tmp_path / "link/*") == [bytes(tmp_path / "target/[sub]")]


def test_links_in_a_ring_are_told(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    assert passed(tmp_path / "one/x")[0].why == "too many symbolic links"


# How old a unit is.


def judge(directory: Path, selection: Selection | None = None, *fields: Field) -> list[Judged]:
    matcher = Matcher(selection or Selection(types=frozenset(KINDS)))
    with KERNEL.open_path(bytes(directory)) as fd:
        return list(judge_units(KERNEL, BackingAndMount(fd), matcher, RuleAge(fields or ("mtime",), OLD_NS + 1)))


def old(directory: Path) -> set[bytes]:
    return {one.name for one in judge(directory) if isinstance(one, Unit)}


def test_newest_file_inside_decides(tmp_path: Path) -> None:
    put(tmp_path / "used/a/b/c/new", NOW_NS)
    put(tmp_path / "used/old")
    put(tmp_path / "unused/a/b/c/old")
    put(tmp_path / "unused/a/older", OLD_NS - 7)
    os.utime(tmp_path / "used", ns=(1, 1))
    assert old(tmp_path) == {b"unused"}
    (unused,) = [one for one in judge(tmp_path) if isinstance(one, Unit)]
    assert (unused.newest_ns, unused.n_bytes) == (OLD_NS, 14)


def test_file_and_empty_directory_are_units_by_their_own_time(tmp_path: Path) -> None:
    put(tmp_path / "old-file")
    put(tmp_path / "new-file", NOW_NS)
    (tmp_path / "old-empty/inner").mkdir(parents=True)
    (tmp_path / "new-empty").mkdir()
    os.utime(tmp_path / "old-empty/inner", ns=(1, 1))
    (tmp_path / "old-link").symlink_to("/etc/passwd")
    os.utime(tmp_path / "old-link", ns=(1, 1), follow_symlinks=False)
    assert old(tmp_path) == {b"old-file", b"old-empty", b"old-link"}


def test_look_ends_at_the_first_young_file(tmp_path: Path) -> None:
    for number in range(50):
        put(tmp_path / f"unit/{number}", NOW_NS)
    calls: list[str] = []
    kernel = Kernel(calls.append)
    with KERNEL.open_path(bytes(tmp_path)) as fd:
        judged = judge_units(kernel, BackingAndMount(fd), Matcher(Selection(types=frozenset("d"))), _AGE)
        assert list(judged) == [Young(b"unit")]  # type: ignore[arg-type]
    assert len(calls) < 20


def test_who_is_stopped_calls_nothing_old_that_he_has_not_looked_at(tmp_path: Path) -> None:
    put(tmp_path / "unit/a/old")
    with KERNEL.open_path(bytes(tmp_path)) as fd:
        judged = judge_units(KERNEL, BackingAndMount(fd), Matcher(Selection(types=frozenset("d"))), _AGE, lambda: True)
        assert not [one for one in judged if isinstance(one, Unit)]


def test_names_owners_and_kinds_say_what_is_a_unit(tmp_path: Path) -> None:
    for name in ("job-1/x", "job-2/x", "other/x", "job-3"):
        put(tmp_path / name)
    selection = Selection(names=("job-*",), excludes=("job-2",), types=frozenset("d"), uids=(os.geteuid(),))
    assert [type(one) for one in judge(tmp_path, selection)] == [Unit]
    assert judge(tmp_path, selection._replace(uids=(MALLORY,))) == []


@pytest.mark.parametrize("fields", [("ctime",), ("btime",), ("mtime", "ctime")])
def test_other_times_decide_if_they_are_asked_for(tmp_path: Path, fields: tuple[Field, ...]) -> None:
    put(tmp_path / "unit/file")
    assert [type(one) for one in judge(tmp_path, None, *fields)] == [Young]


@pytest.mark.parametrize(
    ("name", "why"),
    [("a/.trashd-keep", KEPT), (".trashd-keep", KEPT), ("a/x.precious", "contains an excluded file"),
     ("a/.trashd/u", "contains a trash store")],
)  # fmt: skip
def test_unit_that_holds_what_must_stay_is_left_and_told(tmp_path: Path, name: str, why: str) -> None:
    put(tmp_path / "unit/a/file")
    put(tmp_path / "unit" / name)
    selection = Selection(types=frozenset(KINDS), excludes=("*.precious",))
    assert judge(tmp_path, selection) == [Spared(b"unit", why)]


@pytest.mark.parametrize("how", [fcntl.LOCK_SH, fcntl.LOCK_EX])
@pytest.mark.parametrize("name", ["unit", "unit/a", "unit/a/file"])
def test_unit_in_which_something_is_locked_is_left_and_told(tmp_path: Path, name: str, how: int) -> None:
    put(tmp_path / "unit/a/file")
    with locked(tmp_path / name, how):
        assert judge(tmp_path) == [Spared(b"unit", LOCKED)]
    assert old(tmp_path) == {b"unit"}


@needs_root
def test_unit_in_which_something_is_mounted_is_left_and_told(tmp_path: Path) -> None:
    put(tmp_path / "unit/file")
    (tmp_path / "unit/a/mnt").mkdir(parents=True)
    with tmpfs_over(tmp_path / "unit/a/mnt"):
        assert judge(tmp_path) == [Spared(b"unit", MOUNTED)]


def test_pipe_nobody_writes_into_holds_nobody_up(tmp_path: Path) -> None:
    (tmp_path / "unit").mkdir()
    os.mkfifo(tmp_path / "unit/pipe")
    os.utime(tmp_path / "unit/pipe", ns=(1, 1))
    assert old(tmp_path) == {b"unit"}


def test_looking_makes_nothing_look_used(tmp_path: Path) -> None:
    (tmp_path / "unit/empty").mkdir(parents=True)
    os.utime(tmp_path / "unit/empty", ns=(1, 1))
    judge(tmp_path)
    assert (tmp_path / "unit/empty").stat().st_atime_ns == 1


# Who is asked before.


def spares(path: Path, *, holds: bool) -> tuple[str | ReportedMark | None, bool]:
    """What the guard says, and whether another process could lock the directory then."""
    with KERNEL.open_path(bytes(path)) as opened, KERNEL.open_dir(opened) as fd:
        said = why_spared(KERNEL, BackingAndMount(fd), holds=holds)
        return said, why_locked(KERNEL, opened, b".") is None


def test_directory_is_locked_while_it_is_at_work(tmp_path: Path) -> None:
    assert spares(tmp_path, holds=True) == (None, False)
    assert spares(tmp_path, holds=False) == (None, True)
    with locked(tmp_path):
        assert spares(tmp_path, holds=True) == (LOCKED, False)


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir, lambda keep: keep.symlink_to("none")])
def test_keep_file_is_one_whatever_it_is(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / ".trashd-keep")
    assert spares(tmp_path, holds=True) == (KEPT, True)


def test_file_with_two_names_is_not_locked_by_ourselves(tmp_path: Path) -> None:
    put(tmp_path / "a")
    os.link(tmp_path / "a", tmp_path / "b")
    with KERNEL.open_path(bytes(tmp_path)) as fd, ExitStack() as locks:
        assert [why_locked(KERNEL, fd, name, locks) for name in (b"a", b"b")] == [None, None]


class Everything(Action):
    def __init__(self) -> None:
        self.taken: list[str] = []

    def take(self, _here: ActionPlace, names: Sequence[str]) -> ActionResult:
        self.taken += names
        return ActionResult()


def test_each_locked_file_is_told_once_and_the_others_are_taken(tmp_path: Path) -> None:
    for name in "abcdef":
        put(tmp_path / name)
    action = Everything()
    with ExitStack() as owned:
        for name in "acf":
            owned.enter_context(locked(tmp_path / name))
        sides = BackingAndMount(owned.enter_context(KERNEL.open_path(bytes(tmp_path))))
        here = ActionPlace(KERNEL, sides, b"", False, DeepOpeners(KERNEL))
        taken = Locking(action, holds=True).take(here, list("abcdef"))
    assert (action.taken, list(taken.spared)) == (list("bde"), [(name, LOCKED) for name in "acf"])


@pytest.mark.parametrize("name", [".", "unit", "unit/file"])
def test_lock_on_the_mounted_side_counts_too(tmp_path: Path, name: str) -> None:
    for side in ("backing", "mounted"):  # a flock through a mount is held in the mount alone
        put(tmp_path / side / "unit/file")
    with ExitStack() as owned:
        paths = [bytes(tmp_path / side) for side in ("backing", "mounted")]
        sides = BackingAndMount(*(owned.enter_context(KERNEL.open_path(path)) for path in paths))
        readable = BackingAndMount(owned.enter_context(KERNEL.open_dir(sides.fd)), sides.mounted)
        owned.enter_context(locked(tmp_path / "mounted" / name))
        guarded = why_spared(KERNEL, readable, holds=True)
        judged = list(judge_units(KERNEL, sides, Matcher(Selection(types=frozenset("d"))), _AGE))
        here = ActionPlace(KERNEL, sides, b"", False, DeepOpeners(KERNEL))
        taken = Locking(Everything(), holds=True).take(here, ["unit"])
    assert guarded == (LOCKED if name == "." else None)
    assert judged == [Spared(b"unit", LOCKED)] if name != "." else isinstance(judged[0], Unit)
    assert list(taken.spared) == ([("unit", LOCKED)] if name == "unit" else [])
