"""What is remembered is bounded, as long as it is true; nothing where names fold or xattrs are missing."""

import errno
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from fusefs.core.metadata_cache import ROOT
from fusefs.linux import filesystem_probes, syscalls
from fusefs.mount.tree.vfs import Vfs
from tests.support.acls import ACCESS
from tests.support.covering_sets import Axes
from tests.support.fake_dev_fuse import DirectoryRequests, Names, Somebody, vfs_at
from tests.support.foreground_mount import Mounted, trashd_mount, until
from tests.support.fuse_casefold import folding_volume
from tests.support.fuse_slow import slow_volume
from tests.support.make_trees import fill
from tests.support.proc_stat import status_of
from tests.support.real_filesystems import overlay_volume, tmpfs_volume
from tests.support.trashd_command import EXECUTED

pytestmark = pytest.mark.needs("root", "fuse")


N_LOOKUPS = int(os.environ.get("TRASHD_TEST_LOOKUPS", "6000"))
N_FILES = 2000
N_ROUND = 1500
CACHE_BYTES = 512 << 10
GROWTH_KIB = 3 << 9  # what the interpreter's own pools take now and then


@dataclass(frozen=True)
class Setup(Axes):
    """Of a mount: its coherence, and whether operations go to threads."""

    coherence: str
    backing: str

    def options(self) -> list[str]:
        own = [f"coherence={self.coherence}", f"backing={self.backing}", f"cache_size={CACHE_BYTES}"]
        return [*own, "timeout=3600"] if self.coherence == "shared" else own


IN_THREADS = Setup("exclusive", "slow")
SETUPS = {"local": Setup("exclusive", "local"), "shared": Setup("shared", "local"), "in threads": IN_THREADS}
_NUMBERS = itertools.count()


@contextmanager
def a_mount(setup: Setup) -> Iterator[Mounted]:
    with tmpfs_volume("64m", ["nr_inodes=50000"]) as volume:
        fill(volume / "flat", N_FILES)
        with trashd_mount(volume, options=setup.options(), limit_s=100_000, command=EXECUTED) as mounted:
            yield mounted


def look_up_missing(top: Path, n: int) -> None:
    """Names that never existed, each once."""
    for _ in range(n):
        assert not os.path.lexists(top / f"flat/missing-{next(_NUMBERS)}")


def look_up_files(top: Path, n: int) -> None:
    for i in range(n):
        os.lstat(top / f"flat/f{i % N_FILES}")


def list_all(top: Path, n: int) -> None:
    for _ in range(0, n, N_FILES):
        with os.scandir(top / "flat") as entries:
            for entry in entries:
                entry.stat(follow_symlinks=False)


def make_and_remove(top: Path, n: int) -> None:
    """Inodes that come and go; a change costs as much as ten looks."""
    for _ in range(n // 10):
        path = top / f"flat/made-{next(_NUMBERS)}"
        path.touch()
        path.rename(top / "flat/renamed")
        path.exists()
        (top / "flat/renamed").unlink()


@pytest.mark.parametrize("look", [look_up_missing, look_up_files, list_all, make_and_remove])
@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_memory_is_flat_over_many_lookups(setup: Setup, look: Callable[[Path, int], None]) -> None:
    with a_mount(setup) as mounted:
        sizes = []
        for _ in range(0, N_LOOKUPS, N_ROUND):
            look(mounted.path, N_ROUND)
            mounted.forget_all()
            assert until(lambda: mounted.n_nodes() == 1)
            sizes.append(int(status_of(mounted.pid)["RssAnon"][0]))
        half = max(sizes[: len(sizes) // 2])
        assert sizes[-1] < half + GROWTH_KIB, sizes
        print(f"{look.__name__}: {sizes[0]} KiB, {half} KiB, {sizes[-1]} KiB")


@pytest.mark.takes_engine  # without it nothing goes to threads, and so nothing is remembered
def test_tables_are_empty_and_the_cache_is_full_when_all_is_forgotten() -> None:
    """I7: no node but the root; and what is remembered is as much as was allowed, no more."""
    with a_mount(IN_THREADS) as mounted:
        for look in (list_all, look_up_missing):
            look(mounted.path, N_ROUND)
            mounted.forget_all()
        assert until(lambda: mounted.n_nodes() == 1)
        told = mounted.stats().gauges
        assert CACHE_BYTES / 4 < told["cache_bytes"] <= CACHE_BYTES
        assert told["cache_size_bytes"] == CACHE_BYTES
        assert told["n_handles"] == 0


@pytest.fixture(params=["local", "slow"])
def mounted(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    with tmpfs_volume() as volume:
        (volume / "source").mkdir()
        for name in ("file", "other"):
            (volume / "source" / name).touch()
            os.setxattr(volume / "source" / name, "user.x", b"1")
        options = ["coherence=exclusive", "no_xattr", f"backing={request.param}"]
        with trashd_mount(volume / "source", options=options) as mounted:
            yield mounted


CALLS: dict[str, Callable[[Path], object]] = {
    "get": lambda path: os.getxattr(path, "user.x"),
    "get an ACL": lambda path: os.getxattr(path, ACCESS),
    "set": lambda path: os.setxattr(path, "user.x", b"2"),
    "remove": lambda path: os.removexattr(path, "user.x"),
}


@pytest.mark.parametrize("call", CALLS)
def test_without_them_all_calls_say_so(mounted: Mounted, call: str) -> None:
    """Of ACLs the kernel says itself that a file has none."""
    for _ in range(2):
        for name in ("file", "other"):
            with pytest.raises(OSError, match=r".") as caught:
                CALLS[call](mounted.path / name)
            assert caught.value.errno == (errno.ENODATA if call == "get an ACL" else errno.EOPNOTSUPP)
    assert os.getxattr(mounted.backing / "file", "user.x") == b"1"


def test_without_them_the_kernel_asks_once(mounted: Mounted) -> None:
    for name in ("file", "other", "."):
        for _ in range(5):
            with pytest.raises(OSError, match=r"."):
                os.getxattr(mounted.path / name, "user.x")
    assert mounted.n_requests_for("getxattr", "listxattr") == 1


def test_without_them_files_go_on(mounted: Mounted) -> None:
    (mounted.path / "new").write_bytes(b"content")
    (mounted.path / "new").chmod(0o640)
    assert (mounted.path / "new").stat().st_mode & 0o777 == 0o640


ME = Somebody(0, 0, os.getpid(), 0o022)
CASEFOLD_FL = 0x40000000
SPELLINGS = ("Readme", "README", "readme", "rEADME")


@pytest.mark.parametrize("backing", ["local", "slow"])
def test_each_spelling_is_found_as_below(backing: str) -> None:
    with folding_volume(["Readme", "other"]) as volume:
        point = volume.with_name("mounted")
        with trashd_mount(volume, point, ["ro", "coherence=exclusive", f"backing={backing}"]) as mounted:
            for _ in range(2):
                for name in SPELLINGS:
                    assert os.path.lexists(point / name)
                    assert not os.path.lexists(point / f"{name}-absent")
                assert sorted(os.listdir(point)) == ["Readme", "other"]
                mounted.forget_all()


@pytest.fixture
def folding(monkeypatch: pytest.MonkeyPatch) -> Iterator[Vfs]:
    """A tree whose directories say that they fold, all but `exact`, as this kernel has none that does."""

    def ioctl(fd: int, _request: int, buffer: bytearray) -> None:
        folds = os.path.basename(os.readlink(f"/proc/self/fd/{fd}")) != "exact"
        buffer[:4] = (CASEFOLD_FL if folds else 0).to_bytes(4, "little")

    with tmpfs_volume() as top:
        (top / "known").write_bytes(b"content")
        (top / "exact").mkdir()
        monkeypatch.setattr(syscalls, "ioctl", ioctl)
        monkeypatch.setattr(filesystem_probes, "_TMPFS_FEATURE", os.fspath(top))
        with vfs_at(top, timeout_s=3600) as vfs:
            yield vfs


def test_a_missing_name_is_not_remembered_where_names_fold(folding: Vfs) -> None:
    with pytest.raises(FileNotFoundError):
        Names(folding).lookup(ROOT, b"absent", ME)


def test_a_name_is_asked_for_each_time_where_names_fold(folding: Vfs) -> None:
    """Of `known` unlinked as `KNOWN` the kernel would not learn."""
    assert Names(folding).lookup(ROOT, b"known", ME).timeout_s == 0
    assert Names(folding).mkdir(ROOT, b"made", 0o755, ME).timeout_s == 0


def test_each_directory_s_own_flag_counts(folding: Vfs) -> None:
    exact = Names(folding).lookup(ROOT, b"exact", ME).nodeid
    for _ in range(2):
        assert Names(folding).lookup(exact, b"absent", ME).timeout_s
        with pytest.raises(FileNotFoundError):
            Names(folding).lookup(ROOT, b"absent", ME)


def test_a_listing_makes_no_name_known_where_names_fold(folding: Vfs) -> None:
    listed = DirectoryRequests(folding).entries(ROOT)
    assert {one.name for one in listed} == {b".", b"..", b"known", b"exact"}
    assert not any(one.entry.nodeid for one in listed)


def test_a_missing_name_is_remembered_where_they_do_not() -> None:
    with tmpfs_volume() as top, vfs_at(top, timeout_s=3600) as vfs:
        entry = Names(vfs).lookup(ROOT, b"absent", ME)
        assert (entry.nodeid, entry.timeout_s > 0) == (0, True)
        assert Names(vfs).mkdir(ROOT, b"made", 0o755, ME).timeout_s > 0


def test_a_change_of_mounts_makes_no_empty_directory_uncacheable() -> None:
    """The first names of a FUSE filesystem show that case matters; an empty directory shows nothing."""
    with tmpfs_volume() as top:
        fill(top / "full", 1)
        (top / "empty").mkdir()
        with slow_volume(top) as volume, vfs_at(volume.path, timeout_s=3600) as vfs:
            Names(vfs).lookup(ROOT, b"full", ME)
            empty = vfs.nodes.get(Names(vfs).lookup(ROOT, b"empty", ME).nodeid)
            assert empty is not None
            vfs.lock.submounts.folding.clear()  # as after each change of mounts, since device numbers are reused
            with vfs.lock, vfs.directory_fd(empty) as fd:
                assert not vfs.are_uncacheable_in(empty, fd)


LIMIT_S = 40.0
CONTENT = b"content " * 1000


class File(NamedTuple):
    """One, seen through the mount and behind it, where nothing tells of changes."""

    mounted: Mounted
    seen: Path
    behind: Path

    def costs_a_read(self) -> bool:
        """Whether it was read anew from the backing filesystem."""
        before = self.mounted.n_requests_for("read")
        assert self.seen.read_bytes() == self.behind.read_bytes()
        return self.mounted.n_requests_for("read") > before


@pytest.fixture
def file() -> Iterator[File]:
    with overlay_volume() as overlay:
        (overlay.path / "file").write_bytes(CONTENT)
        with trashd_mount(overlay.path, options=["coherence=shared", "passthrough=off"]) as mounted:
            yield File(mounted, mounted.path / "file", overlay.path / "file")


def test_what_has_not_changed_for_a_while_is_read_once(file: File) -> None:
    assert file.costs_a_read()
    assert until(lambda: not any(file.costs_a_read() for _ in range(3)), LIMIT_S)  # but for a kernel short of memory


def test_a_change_in_the_same_tick_is_seen_too(file: File) -> None:
    """Of the same size, and so soon that its time may be that of the one before."""
    for number in range(200):
        with file.behind.open("r+b", buffering=0) as behind:
            os.pwrite(behind.fileno(), b"%04d" % number, 0)
        assert file.seen.read_bytes()[:4] == b"%04d" % number


def test_a_time_that_is_set_back_hides_no_change(file: File) -> None:
    before = file.behind.stat()
    assert until(lambda: not file.costs_a_read(), LIMIT_S)
    file.behind.write_bytes(CONTENT.swapcase())
    os.utime(file.behind, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.seen.read_bytes() == CONTENT.swapcase()
