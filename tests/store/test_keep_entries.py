"""`swap --keep`: what the globs match stays in view, all else is swapped, and a restore puts it together again."""

import errno
import os
import socket
import stat
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from fusefs.cli.main import run
from fusefs.core.errors import NotKept, TrashdError, UsageError
from fusefs.linux.kernel import Kernel
from fusefs.store.check_swap import check_swap
from fusefs.store.stage import SwapOptions
from fusefs.store.swap import Swapped
from tests.store.test_no_exchange import claim_exchange
from tests.support.background_processes import reading
from tests.support.crash_scenarios import forbid_exchange
from tests.support.fuse_bad_rename import lying_volume
from tests.support.make_trees import Spec, make_tree, snapshot
from tests.support.other_users import as_user
from tests.support.sshfs_volumes import sshfs_volume
from tests.support.store_verbs import (
    ActingBefore,
    DyingAt,
    FailingAt,
    InTheGap,
    assert_silent,
    calls_of,
    entries,
    in_child,
    init,
    place,
    raw,
    reap_now,
    record_of,
    recover_all,
    restore,
    swap,
    tmpfs_store,
    tree_of,
)

pytestmark = pytest.mark.needs("root")


TREE: Spec = {"a.conf": "1", "b.conf": "2", "data": {"big": "x"}, "cache": {"deep": {"er": "y"}}, "log": "z"}


def keeping(path: Path, *globs: str, kernel: Kernel | None = None) -> Swapped:
    return swap(path, kernel, SwapOptions(keep=globs))


def names(path: Path) -> set[str]:
    return set(os.listdir(path))


@pytest.fixture
def job(volume: Path) -> Path:
    return make_tree(volume / "job", TREE)


# What stays


@pytest.mark.quick("swap")
def test_files_and_directories_that_match_stay_in_view(job: Path) -> None:
    inos = {name: (job / name).stat().st_ino for name in ("a.conf", "b.conf", "cache")}
    swapped = keeping(job, "*.conf", "cache")
    assert {name: (job / name).stat().st_ino for name in names(job)} == inos
    assert swapped.kept == (b"a.conf", b"b.conf", b"cache")
    assert not swapped.warnings


def test_record_of_a_plain_swap_says_that_nothing_was_kept(job: Path) -> None:
    assert record_of(swap(job)).kept is None


def test_what_is_kept_outlives_the_orphan(volume: Path, job: Path) -> None:
    swapped = keeping(job, "*.conf", "cache")
    assert not reap_now(volume, swapped.id).report.n_failed
    assert (job / "a.conf").read_text() == "1"
    assert (job / "a.conf").stat().st_nlink == 1
    assert (job / "cache/deep/er").read_text() == "y"


def test_links_fifos_and_sockets_stay_as_themselves(volume: Path) -> None:
    job = volume / "job"
    job.mkdir()
    (job / "link").symlink_to("nowhere")
    os.mkfifo(job / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(job / "socket"))
        keeping(job, "*")
    assert {name: stat.S_IFMT((job / name).lstat().st_mode) for name in names(job)} == {
        "link": stat.S_IFLNK,
        "fifo": stat.S_IFIFO,
        "socket": stat.S_IFSOCK,
    }


def test_odd_names_stay(volume: Path) -> None:
    odd = [b"\xff\xfe", b" ", b"-rf", b"new\nline", "ü".encode(), b"%41", b"\\", b"*", b"." * 3, b"n" * 255]
    job = make_tree(volume / "job", dict.fromkeys(odd, "f") | {b"d" + name[:200]: {} for name in odd})
    before = snapshot(job)
    swapped = keeping(job, "*")
    assert sorted(swapped.kept) == sorted(os.listdir(raw(job)))
    assert len(swapped.kept) == 2 * len(odd)
    restore(volume, swapped.id)
    assert snapshot(job) == before


def test_stores_own_names_never_match(volume: Path) -> None:
    job = make_tree(volume / "job", {".trashd.new-1": {}, ".trash": "f"})
    assert keeping(job, ".trash*").kept == (b".trash",)


def test_kept_names_are_kept_again_by_the_next_swap(volume: Path, job: Path) -> None:
    first = keeping(job, "*.conf", "cache")
    second = keeping(job, "a.conf", "cache")
    assert names(job) == {"a.conf", "cache"}
    restore(volume, second.id)
    restore(volume, first.id)
    assert names(job) == {"a.conf", "b.conf", "data", "cache", "log"}
    assert [entry.id for entry in entries(volume)] == []


# What is refused, before anything is touched


def assert_refused(volume: Path, job: Path, kind: type[TrashdError], *globs: str) -> TrashdError:
    before = snapshot(volume)
    with pytest.raises(kind) as caught:
        keeping(job, *globs)
    assert snapshot(volume) == before
    return caught.value


def test_glob_that_matches_nothing_is_refused(volume: Path, job: Path) -> None:
    error = assert_refused(volume, job, NotKept, "*.conf", "*.cnf")
    assert error.message().partition(": ")[0].endswith("job matches '*.cnf'")
    assert (error.exit_code, bool(error.hint)) == (3, True)


def test_refused_glob_makes_no_store(tmp_path: Path) -> None:
    job = make_tree(tmp_path / "job", TREE)
    with pytest.raises(NotKept):
        keeping(job, "nothing")
    assert names(tmp_path) == {"job"}


@pytest.mark.parametrize("glob", ["data/big", "", "./a.conf"])
def test_what_is_no_glob_of_a_name_is_a_usage_error(volume: Path, job: Path, glob: str) -> None:
    assert_refused(volume, job, UsageError, glob)


@pytest.mark.parametrize(("his", "told"), [("2", "protected_hardlinks"), ({}, "write permission")], ids=["file", "dir"])
def test_what_another_user_has_in_it_is_refused(volume: Path, his: str | Spec, told: str) -> None:
    volume.chmod(0o1777)
    job = volume / "job"
    as_user(4711, lambda: make_tree(job, {"mine": {} if his == {} else "1"}) and None)
    make_tree(volume / "roots", {"his": his})
    (volume / "roots/his").rename(job / "his")

    def act() -> str:
        with pytest.raises(NotKept) as caught:
            keeping(job, "*")
        return caught.value.message()

    assert told in as_user(4711, act)
    assert names(job) == {"mine", "his"}
    assert as_user(4711, lambda: bool(check_swap(Kernel(), raw(job), ("*",)).refusals))


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (errno.EMLINK, "maximum number of hard links"),
        (errno.EPERM, "does not support hard links"),
        (errno.EOPNOTSUPP, "no hard link can be created"),
    ],
)
def test_link_that_the_kernel_refuses_leaves_all_as_it_was(volume: Path, job: Path, number: int, told: str) -> None:
    calls = calls_of(lambda kernel: swap(make_tree(volume / "other", {"f": ""}), kernel, SwapOptions(keep=("f",))))
    first = [n for n, call in enumerate(calls) if call == "link"][1]  # after the record's
    before = snapshot(job)
    with pytest.raises(NotKept, match=told):
        keeping(job, "a.conf", kernel=Kernel(FailingAt(first, number)))
    assert snapshot(job) == before
    assert names(volume / ".trashd/u/0/stage") == set()


def test_full_volume_is_no_reason_of_its_own(volume: Path, job: Path) -> None:
    hook = Failing("link", 2, errno.ENOSPC)
    with pytest.raises(TrashdError) as caught:
        keeping(job, "*.conf", kernel=Kernel(hook))
    assert caught.value.errno == errno.ENOSPC
    assert names(job) == set(TREE)
    assert_silent(volume)


def test_file_that_became_a_directory_is_told_as_one(job: Path) -> None:
    def become() -> None:
        (job / "a.conf").unlink()
        (job / "a.conf").mkdir()

    links = iter([lambda: None, become])  # the first is the record's
    kernel = Kernel(lambda call: next(links, lambda: None)() if call == "link" else None)
    with pytest.raises(NotKept, match="replaced with a directory"):
        keeping(job, "a.conf", kernel=kernel)


class Failing:
    """A hook that fails each call of a name from the n-th on."""

    def __init__(self, call: str, n: int, number: int) -> None:
        self.call = call
        self.left = n
        self.number = number

    def __call__(self, call: str) -> None:
        self.left -= call == self.call
        if call == self.call and self.left < 0:
            raise OSError(self.number, os.strerror(self.number))


# What changes meanwhile


def swap_while(job: Path, act: Callable[[], object], *globs: str) -> Swapped:
    """Swap, and do something right before the exchange, when the links are there."""
    return keeping(job, *globs, kernel=Kernel(ActingBefore("exchange", act)))


def test_file_that_came_at_that_moment_is_in_view(job: Path) -> None:
    swap_while(job, lambda: (job / "new.conf").write_text("new"), "*.conf")
    assert (job / "new.conf").read_text() == "new"


def test_file_that_was_replaced_at_that_moment_is_in_view_as_it_was_last(job: Path) -> None:
    swapped = swap_while(job, lambda: ((job / "tmp").write_text("new"), (job / "tmp").rename(job / "a.conf")), "*.conf")
    assert (job / "a.conf").read_text() == "new"
    assert (tree_of(swapped) / "a.conf").read_text() == "1"


def test_file_that_went_at_that_moment_is_not_in_view_and_not_lost(job: Path) -> None:
    swapped = swap_while(job, (job / "a.conf").unlink, "*.conf")
    assert names(job) == {"b.conf"}
    assert (tree_of(swapped) / "a.conf").read_text() == "1"


def test_file_that_somebody_replaced_in_the_fresh_directory_is_left_to_him(job: Path) -> None:
    def replace() -> None:
        (job / "tmp").write_text("his")
        (job / "tmp").rename(job / "a.conf")

    keeping(job, "*.conf", "cache", kernel=Kernel(ActingBefore("renameat2", replace)))
    assert (job / "a.conf").read_text() == "his"


def test_directory_whose_name_was_taken_stays_in_the_old_tree_and_is_told(volume: Path, job: Path) -> None:
    swapped = keeping(job, "cache", kernel=Kernel(ActingBefore("renameat2", (job / "cache2").mkdir)))
    assert not swapped.warnings
    taken = make_tree(volume / "taken", TREE)
    swapped = keeping(taken, "cache", kernel=Kernel(ActingBefore("renameat2", (volume / "taken/cache").mkdir)))
    assert "cache (File exists)" in swapped.warnings[0]
    assert (tree_of(swapped) / "cache/deep/er").read_text() == "y"


def test_directory_that_could_not_be_moved_now_is_moved_by_the_next_command(volume: Path, job: Path) -> None:
    swapped = keeping(job, "cache", kernel=Kernel(Failing("renameat2", 0, errno.ENOSPC)))
    assert "the next trashd command" in swapped.warnings[0]
    assert names(job) == set()
    assert recover_all(volume) == []
    assert (job / "cache/deep/er").read_text() == "y"
    assert_silent(volume)


def test_reader_never_misses_what_is_kept_in_a_swap(volume: Path, job: Path) -> None:
    for _ in range(10):
        with reading(job / "a.conf"):
            swapped = keeping(job, "a.conf", "cache")
        restore(volume, swapped.id)  # see tests/store/test_mounted.py


# The command


def test_command_tells_what_is_kept(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["swap", "--keep", "*.conf", "--keep", "cache", str(job)]) == 0
    assert "  keep  a.conf, b.conf, cache\n" in capsys.readouterr().out


def test_dry_run_tells_what_would_be_kept_and_what_matches_nothing(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(job)
    assert run(["swap", "--dry-run", "--keep", "*.conf", str(job)]) == 0
    assert "  keep     a.conf, b.conf\n" in capsys.readouterr().out
    assert run(["swap", "--dry-run", "--keep", "*.cnf", str(job)]) == 3
    assert "matches '*.cnf'" in capsys.readouterr().out
    assert snapshot(job) == before


# Its restore


def test_restore_takes_what_was_written_in_a_kept_directory_with_it(volume: Path, job: Path) -> None:
    swapped = keeping(job, "*.conf", "cache")
    (job / "cache/new").write_text("n")
    (job / "a.conf").write_text("changed in place")
    assert restore(volume, swapped.id).rescued is None
    assert (job / "cache/new").read_text() == "n"
    assert (job / "a.conf").read_text() == "changed in place"


def test_what_was_changed_or_added_meanwhile_is_an_orphan_of_its_own(volume: Path, job: Path) -> None:
    swapped = keeping(job, "*.conf", "cache")
    (job / "new").write_text("added")
    (job / "tmp").write_text("replaced")
    (job / "tmp").rename(job / "a.conf")
    (job / "more").mkdir()
    done = restore(volume, swapped.id)
    assert (names(job), (job / "a.conf").read_text()) == (set(TREE), "1")
    assert done.rescued is not None
    rescued = place(volume, done.rescued) / "tree"
    assert {name: (rescued / name).is_dir() for name in names(rescued)} == {"new": False, "a.conf": False, "more": True}


def test_another_directory_of_a_kept_name_is_an_orphan_and_the_absence_told(volume: Path, job: Path) -> None:
    swapped = keeping(job, "cache")
    (job / "cache").rename(volume / "moved away")
    (job / "cache").mkdir()
    done = restore(volume, swapped.id)
    assert "cache" not in names(job)
    assert "cache" in done.warnings[0]
    assert done.rescued is not None
    assert (volume / "moved away/deep/er").read_text() == "y"


def test_restore_elsewhere_leaves_in_view_what_is_kept(volume: Path, job: Path) -> None:
    swapped = keeping(job, "*.conf", "cache")
    done = restore(volume, swapped.id, to=volume / "elsewhere")
    assert names(job) == {"a.conf", "b.conf", "cache"}
    assert names(volume / "elsewhere") == {"a.conf", "b.conf", "data", "log"}
    assert "cache" in done.warnings[0]


def test_restore_to_a_free_name_tells_what_is_not_in_it(volume: Path, job: Path) -> None:
    swapped = keeping(job, "*.conf", "cache")
    job.rename(volume / "moved")
    done = restore(volume, swapped.id)
    assert names(job) == {"a.conf", "b.conf", "data", "log"}
    assert "cache" in done.warnings[0]
    assert (volume / "moved/cache/deep/er").read_text() == "y"


def test_fresh_directory_that_holds_a_foreign_link_of_a_file_keeps_it(volume: Path, job: Path) -> None:
    swapped = keeping(job, "a.conf")
    os.link(job / "a.conf", job / "another name")
    done = restore(volume, swapped.id)
    assert done.rescued is not None
    assert names(place(volume, done.rescued) / "tree") == {"another name"}


SMALL: Spec = {"a": "1", "sub": {"b": "2"}, "rest": "3"}
KEEP = SwapOptions(keep=("a", "sub"))


@pytest.fixture
def without_exchange() -> Iterator[Path]:
    """A volume that believes that it can't exchange."""
    with tmpfs_store() as path:
        forbid_exchange(path)
        yield path


@pytest.fixture
def small_job(without_exchange: Path) -> Path:
    return make_tree(without_exchange / "job", SMALL)


def test_name_that_was_taken_in_the_gap_is_left_to_him_and_told(without_exchange: Path, small_job: Path) -> None:
    before = snapshot(small_job)
    swapped = swap(small_job, Kernel(InTheGap(small_job, small_job.mkdir)), KEEP)
    assert "and contains everything that --keep selected" in swapped.warnings[0]
    assert os.listdir(small_job) == []
    assert snapshot(tree_of(swapped)) == before
    assert (tree_of(swapped) / "a").stat().st_nlink == 1
    assert_silent(without_exchange)


def test_name_that_was_taken_after_a_kill_in_the_gap_gets_nothing(without_exchange: Path, small_job: Path) -> None:
    before = snapshot(small_job)
    killed = in_child(partial(swap, small_job, Kernel(InTheGap(small_job, partial(os._exit, DyingAt.EXIT_CODE))), KEEP))
    assert killed == DyingAt.EXIT_CODE
    small_job.mkdir()
    assert recover_all(without_exchange) == []
    [orphan] = (without_exchange / ".trashd/u/0/orphans").glob("*/tree")
    assert snapshot(orphan) == before
    assert (orphan / "a").stat().st_nlink == 1
    assert os.listdir(small_job) == []


@pytest.mark.needs("fuse")
@pytest.mark.parametrize("mode", ["ignore", "lie", "einval"])
@pytest.mark.parametrize("claims", [False, True])
def test_liars_keep_or_refuse_and_lose_nothing(mode: str, *, claims: bool) -> None:
    with lying_volume(mode) as served:
        init(served.path)
        if claims:
            claim_exchange(served.path)
        small_job = make_tree(served.path / "job", SMALL)
        try:
            swapped = swap(small_job, options=KEEP)
        except NotKept:
            assert sorted(os.listdir(small_job)) == ["a", "rest", "sub"]
        else:
            assert sorted(os.listdir(small_job)) == ["a", "sub"]
            restore(served.path, swapped.id)
            assert sorted(os.listdir(small_job)) == ["a", "rest", "sub"]
        assert (small_job / "sub/b").read_text() == "2"
        assert entries(served.path) == []
        assert_silent(served.path)


@pytest.mark.needs("fuse", "sshfs")
def test_sshfs_keeps_directories_and_refuses_files_whose_links_it_does_not_show() -> None:
    with sshfs_volume() as served:
        init(served.path)
        small_job = make_tree(served.path / "job", SMALL)
        with pytest.raises(NotKept):
            swap(small_job, options=KEEP)
        assert sorted(os.listdir(small_job)) == ["a", "rest", "sub"]
        swapped = swap(small_job, options=SwapOptions(keep=("sub",)))
        assert (small_job / "sub/b").read_text() == "2"
        assert os.listdir(small_job) == ["sub"]
        restore(served.path, swapped.id)
        assert sorted(os.listdir(small_job)) == ["a", "rest", "sub"]
        assert entries(served.path) == []
        assert_silent(served.path)
