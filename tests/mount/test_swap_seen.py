"""A tree that is swapped, restored and reaped under its clients: what they see, get back, and what is freed."""

import errno
import itertools
import mmap
import os
import pickle
import select
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn

import pytest

from fusefs.cli import wait
from fusefs.core.errors import Incomplete
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import RESTORED_XATTRS, Kernel
from fusefs.linux.statx import stat_at
from fusefs.linux.syscalls import AT_FDCWD, RENAME_EXCHANGE, renameat2
from tests.support.acls import ACCESS, DEFAULT, GROUP_OBJ, MASK, NOBODY, OTHER, USER, USER_OBJ, acl
from tests.support.crash_scenarios import DyingAfter
from tests.support.foreground_mount import SHARED_LIMIT_S, Mounted, trashd_mount, until
from tests.support.oracle_subjects import outcome
from tests.support.real_filesystems import WITH_XFS, loop_volume, project_of, set_project, sync
from tests.support.store_verbs import assert_silent, entries, in_child, init, reap_now, recover_all, restore, swap
from tests.support.trashd_command import done_well, swapped, trashd

pytestmark = pytest.mark.needs("root", "fuse", "loop")


N_CLIENTS = 4
SIZE = 3 * mmap.PAGESIZE
LIMIT_S = 60.0
OPTIONS = {
    "exclusive": ["coherence=exclusive"],
    "exclusive, by the daemon": ["coherence=exclusive", "passthrough=off"],
    "shared": ["coherence=shared"],
    "shared, by the daemon": ["coherence=shared", "passthrough=off"],
    "slow": ["coherence=exclusive", "backing=slow"],
}


class Client:
    """One of them, as it sees things from inside: its number is in all that it writes."""

    def __init__(self, victim: Path, number: int) -> None:
        self._victim = victim
        self._number = number
        self._home = victim / f"home{number}"
        os.chdir(self._home)
        self._fd = os.open("file", os.O_RDWR)
        self._mapped = mmap.mmap(self._fd, SIZE)
        self._directory = os.open(victim, os.O_RDONLY | os.O_DIRECTORY)
        self._n = 0

    def work(self, *, stands: bool) -> None:
        """Once; Raises  OSError, AssertionError: what it sees is wrong. stands: the tree is not being reaped"""
        self._n = self._n % 250 + 1
        os.pwrite(self._fd, bytes([self._n]), 10)
        assert self._mapped[10] == self._n
        self._mapped[mmap.PAGESIZE + 10] = self._n
        assert os.pread(self._fd, 1, mmap.PAGESIZE + 10)[0] == self._n
        assert os.fstat(self._fd).st_size == SIZE
        with suppress(FileNotFoundError):
            assert (self._victim / "number").read_bytes() in (b"tree", b"")
        if stands:
            os.close(os.open("made", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            os.rename("made", "renamed")
            assert sorted(os.listdir(".")) == ["file", "renamed"]
            os.unlink("renamed")
            assert f"home{self._number}" in os.listdir(f"/proc/self/fd/{self._directory}")
            assert os.stat("number", dir_fd=self._directory).st_size == 4

    def report(self, *, stands: bool) -> list[object]:
        """All that it sees, and can do; nothing changes meanwhile.

        stands  else where it was is told on by a mount (docs/explain/mount-semantics.md)
        """
        st = os.fstat(self._fd)
        own = f"home{self._number}"
        return [
            (st.st_nlink, st.st_size, st.st_mode, self._mapped[:] == os.pread(self._fd, SIZE, 0)),
            sorted(os.listdir(self._victim)),
            outcome(lambda: (self._victim / own / "file").read_bytes()[:5]),
            _kind(os.getcwd) if stands else None,
            (os.stat(".").st_nlink, os.fstat(self._directory).st_nlink),
            outcome(lambda: sorted(os.listdir("."))),
            outcome(lambda: sorted(os.listdir(f"/proc/self/fd/{self._directory}"))),
            _kind(lambda: os.close(os.open("new", os.O_CREAT | os.O_WRONLY))),
            _kind(lambda: os.unlink("new")),
            _kind(lambda: os.mkdir("inner", dir_fd=self._directory)),
            _kind(lambda: os.rmdir("inner", dir_fd=self._directory)),
            _kind(lambda: os.stat("../number")),
            _kind(lambda: os.ftruncate(self._fd, SIZE)),
            _kind(lambda: os.close(os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR))),
        ]


def _kind(act: Callable[[], object]) -> str:
    """Whether something works, and if not, why."""
    try:
        act()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "is done"


def live(victim: Path, number: int, asked: int, tells: int) -> NoReturn:
    """Work; when asked, report, and again; b"r": the tree does not stand any more from now on."""
    try:
        client, stands = Client(victim, number), True
        os.write(tells, pickle.dumps(None))
        while True:
            if not select.select([asked], [], [], 0)[0]:
                client.work(stands=stands)
                continue
            what = os.read(asked, 1)
            if not what:
                os._exit(0)
            stands &= what != b"r"
            os.write(tells, pickle.dumps(client.report(stands=stands) if what == b"?" else None))
    except BaseException as error:
        os.write(tells, pickle.dumps(repr(error)))
    finally:
        os._exit(1)


class Clients:
    """All of them, from outside."""

    def __init__(self, pipes: Sequence[tuple[int, int]]) -> None:
        self._pipes = pipes
        for _, hears in pipes:
            self._hear(hears)

    def ask(self, what: bytes) -> list[object]:
        """What each answers, one after the other."""
        answers = []
        for asks, hears in self._pipes:
            os.write(asks, what)
            answers.append(self._hear(hears))
        return answers

    def _hear(self, hears: int) -> object:
        assert select.select([hears], [], [], LIMIT_S)[0], "a client hangs"
        told = os.read(hears, 1 << 16)
        assert told, "a client has ended"
        answer = pickle.loads(told)
        assert not isinstance(answer, str), answer
        return answer


@contextmanager
def clients(victim: Path) -> Iterator[Clients]:
    with ExitStack() as stack:
        pipes: list[tuple[int, int]] = []
        for number in range(N_CLIENTS):
            asked, asks = os.pipe()
            hears, tells = os.pipe()
            pid = os.fork()
            if pid == 0:
                for fd in [asks, hears, *(fd for pair in pipes for fd in pair)]:
                    os.close(fd)
                live(victim, number, asked, tells)
            os.close(asked)
            os.close(tells)
            stack.callback(os.waitpid, pid, 0)
            stack.callback(os.close, hears)
            stack.callback(os.close, asks)
            pipes.append((asks, hears))
        yield Clients(pipes)


def played(
    victim: Path,
    swap_: Callable[[], str],
    restore_: Callable[[str], object],
    reap_: Callable[[str], object],
    reaped: list[object] | None = None,
) -> dict[str, list[object]]:
    """What all clients see after each step. reaped: what they see in the end (docs/explain/mount-semantics.md)"""
    victim.mkdir()
    (victim / "number").write_bytes(b"tree")
    for number in range(N_CLIENTS):
        (victim / f"home{number}").mkdir()
        (victim / f"home{number}" / "file").write_bytes(bytes([number + 1]) * SIZE)
    told: dict[str, list[object]] = {}
    with clients(victim) as four:
        told["at first"] = four.ask(b"?")
        for step in ("swapped", "swapped again"):
            identifier = swap_()
            told[step] = four.ask(b"?")
            if step == "swapped":
                restore_(identifier)
                told["restored"] = four.ask(b"?")
        four.ask(b"r")
        reap_(identifier)
        until(lambda: told.update(reaped=four.ask(b"?")) or reaped in (None, told["reaped"]), LIMIT_S)
    return told


def natively(top: Path) -> dict[str, list[object]]:
    victim, aside = top / "victim", top / "aside"

    def exchange() -> str:
        aside.mkdir(exist_ok=True)
        renameat2(AT_FDCWD, os.fsencode(aside), AT_FDCWD, os.fsencode(victim), RENAME_EXCHANGE)
        return ""

    def put_back(_identifier: str) -> None:
        exchange()
        aside.rmdir()

    return played(victim, exchange, put_back, lambda _identifier: shutil.rmtree(aside))


@pytest.mark.parametrize("how", OPTIONS)
def test_clients_of_a_tree_see_what_they_see_natively(how: str) -> None:
    with loop_volume("ext4", 64) as volume:
        (volume / "native").mkdir()
        right = natively(volume / "native")
        source = volume / "source"
        source.mkdir()
        init(source)
        with trashd_mount(source, options=OPTIONS[how]) as mounted:
            seen = played(
                mounted.path / "victim",
                lambda: swap(mounted.path / "victim").id,
                lambda identifier: restore(mounted.path, identifier),
                lambda identifier: reap_now(source, identifier),
                right["reaped"],
            )
        for step in right:
            assert (step, seen[step]) == (step, right[step])


N_DIRECTORIES, N_FILES = 40, 8
LARGE_BYTES = 4 << 20
N_LARGE, NAME_BYTES = 2000, 200
"""So many names, so long, make a directory that `--wait` misses."""
_SLACK = 8
"""Fds and nodes of what was looked at to find out: the store's own directories."""
_SLACK_BYTES = 64 << 10
_NUMBERS = itertools.count()


class Seen(NamedTuple):
    """What a mount and its volume hold."""

    n_nodes: int
    n_deleted: int
    free_bytes: int
    free_inodes: int


@pytest.fixture(scope="module", params=["over itself", "elsewhere", "shared"])
def mount_for_all(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    with loop_volume("ext4") as volume:
        done_well("init", volume)
        coherence = "shared" if request.param == "shared" else "exclusive"
        with trashd_mount(
            volume,
            volume if request.param == "over itself" else None,
            options=[f"coherence={coherence}", "timeout=3600"],
            limit_s=SHARED_LIMIT_S,
        ) as mounted:
            yield mounted


@pytest.fixture
def mount(mount_for_all: Mounted) -> Mounted:
    """Of which the kernel knows nothing of an earlier test's any more."""
    mount_for_all.forget_all()
    return mount_for_all


def n_deleted(mount: Mounted) -> int:
    """Directories and files that the daemon has open though a reaper has deleted them."""
    n = 0
    for fd in Path(f"/proc/{mount.pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            link = os.readlink(fd)
            n += "/.trashd/" in link and link.endswith(" (deleted)")
    return n


def seen(mount: Mounted) -> Seen:
    sync(mount.backing)
    volume = os.statvfs(mount.path)
    return Seen(mount.stats().gauges["n_nodes"], n_deleted(mount), volume.f_bfree * volume.f_frsize, volume.f_ffree)


def fill(mount: Mounted) -> Path:
    top = mount.path / f"job-{next(_NUMBERS)}"
    top.mkdir()
    for number in range(N_DIRECTORIES):
        (directory := top / f"d{number}").mkdir()
        for file in range(N_FILES):
            (directory / f"f{file}").write_bytes(b"content")
    return top


def is_back(mount: Mounted, before: Seen) -> bool:
    now = seen(mount)
    return (
        now.n_nodes <= before.n_nodes + _SLACK
        and now.n_deleted <= before.n_deleted
        and now.free_bytes >= before.free_bytes - _SLACK_BYTES
        and now.free_inodes >= before.free_inodes - _SLACK
    )


def begin(mount: Mounted) -> Seen:
    """What there is when a swap has been once, and no process holds its directory: the store has what it needs."""
    (mount.path / "first").mkdir()
    done_well("reap", "--now", swapped(mount.path / "first")["id"])
    (mount.path / "first").rmdir()
    assert until(lambda: not n_deleted(mount), LIMIT_S)
    return seen(mount)


def swap_and_reap(top: Path) -> None:
    done_well("reap", "--now", swapped(top)["id"])
    top.rmdir()


@pytest.mark.needs("prune")
def test_after_swap_and_reap_all_is_where_it_was(mount: Mounted) -> None:
    before = begin(mount)
    swap_and_reap(fill(mount))
    assert until(lambda: is_back(mount, before), LIMIT_S), (before, seen(mount))


@pytest.mark.needs("prune")
def test_what_somebody_looked_at_in_the_store_is_let_go_of_as_well(mount: Mounted) -> None:
    before = begin(mount)
    identifier = swapped(top := fill(mount))["id"]
    tree = mount.path / ".trashd/u/0/orphans" / str(identifier) / "tree"
    assert sum(len(files) for _, _, files in os.walk(tree)) == N_DIRECTORIES * N_FILES
    assert (tree / "d1/f1").read_bytes() == b"content"
    done_well("reap", "--now", identifier)
    top.rmdir()
    assert until(lambda: is_back(mount, before), LIMIT_S), (before, seen(mount))


@pytest.mark.needs("prune")
def test_a_directory_in_which_a_name_was_missing_is_let_go_of(mount: Mounted) -> None:
    """The kernel remembers such a name, and with it the directory, when nobody is in there any more."""
    before = begin(mount)
    (top := mount.path / "top").mkdir()
    for _ in range(2 * _SLACK):
        identifier = swapped(top)["id"]
        assert not (top / "missing").exists()
        (top / "file").touch()
        (restored,) = done_well("restore", "--json", identifier, "--volume", mount.path).objects()
        done_well("reap", "--now", str(restored["rescued"]))
    top.rmdir()
    assert until(lambda: is_back(mount, before), LIMIT_S), (before, seen(mount))


@pytest.mark.needs("prune")
def test_who_works_in_the_old_tree_goes_on_and_all_comes_back_when_he_has_let_go(mount: Mounted) -> None:
    before = begin(mount)
    top = fill(mount)
    with Fd(os.open(top / "d1", os.O_RDONLY | os.O_DIRECTORY)) as where, (top / "d2/f2").open("r+b") as file:
        identifier = swapped(top)["id"]
        assert until(lambda: mount.stats().gauges["n_nodes"] < N_DIRECTORIES, LIMIT_S)
        assert len(os.listdir(where)) == N_FILES
        os.close(os.open("late", os.O_CREAT | os.O_WRONLY, dir_fd=where))
        done_well("reap", "--now", identifier)
        assert os.fstat(where).st_nlink == 0
        assert file.read() == b"content"
        file.write(b"more")
        file.flush()
        top.rmdir()
        assert not is_back(mount, before)
    assert until(lambda: is_back(mount, before), LIMIT_S), (before, seen(mount))


@pytest.mark.needs("prune")
def test_a_wait_for_the_space_names_the_daemon_that_has_files_open_for_others(
    mount: Mounted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait, "_PATIENCE_S", 1.0)
    top = fill(mount)
    (top / "d2/large").write_bytes(os.urandom(LARGE_BYTES))
    with (top / "d2/large").open("rb"):
        identifier = swapped(top)["id"]
        done = trashd("reap", "--now", "--wait", "--json", identifier)
        assert done.code == Incomplete.exit_code
        *_, told = done.objects()
    (reason,) = [one for one in told["reasons"] if one["kind"] == "open"]
    assert reason["n_bytes"] >= LARGE_BYTES
    assert f"(pid {mount.pid}) has " in reason["detail"]


@pytest.mark.needs("prune")
def test_a_wait_for_the_space_waits_until_the_daemon_has_let_go(mount: Mounted) -> None:
    top = fill(mount)
    for number in range(N_LARGE):
        (top / "d1" / f"{number}".rjust(NAME_BYTES, "x")).touch()
    done = done_well("reap", "--now", "--wait", "--json", swapped(top)["id"])
    assert done.objects()[-1]["is_reached"]


@pytest.mark.needs("prune")
def test_a_restored_tree_is_whole_and_known_anew(mount: Mounted) -> None:
    top = fill(mount)
    identifier = swapped(top)["id"]
    assert until(lambda: mount.stats().gauges["n_nodes"] < N_DIRECTORIES, LIMIT_S)
    done_well("restore", identifier, "--volume", mount.path)
    assert sum(len(files) for _, _, files in os.walk(top)) == N_DIRECTORIES * N_FILES
    with ExitStack() as held:  # the kernel may forget what nobody holds at any time
        for path, _, _ in os.walk(top):
            held.enter_context(Fd(os.open(path, os.O_PATH)))
        assert until(lambda: mount.stats().gauges["n_nodes"] >= N_DIRECTORIES, LIMIT_S)


@pytest.mark.needs("prune")
def test_who_stays_in_a_tree_sees_what_a_reaper_did_there_when_it_is_back(mount: Mounted) -> None:
    """What was told before it was dropped would last for an hour."""
    top = fill(mount)
    with Fd(os.open(top / "d1", os.O_RDONLY)) as held:
        assert until(lambda: _lasts(mount, held))
        drop = (mount.path / ".trashd/drop").resolve()
        top.rename(drop / top.name)
        assert until(lambda: mount.stats().gauges["n_nodes"] < N_DIRECTORIES, LIMIT_S)
        [behind] = mount.backing.glob(".trashd/u/0/orphans/*/tree")
        for file in (behind / "d1").iterdir():
            file.unlink()
        back = mount.path / behind.relative_to(mount.backing)
        back.stat()  # or the kernel, which knows it elsewhere, says ESTALE
        back.rename(top)
        assert os.fstat(held).st_mtime_ns == (mount.backing / top.name / "d1").stat().st_mtime_ns


def _lasts(mount: Mounted, fd: Fd) -> bool:
    """Whether the kernel believes what a directory is for longer than the second for which it believes anything."""
    os.fstat(fd)
    before = mount.stats().operations["getattr"].n()
    time.sleep(1.2)
    os.fstat(fd)
    return mount.stats().operations["getattr"].n() == before


NAMED = acl((USER_OBJ, 7, NOBODY), (USER, 5, 4711), (GROUP_OBJ, 4, NOBODY), (MASK, 5, NOBODY), (OTHER, 0, NOBODY))
N_RESTORED = 12
PROJECT = 47


class Place(NamedTuple):
    """Where things are done, and where they are looked at."""

    top: Path
    below: Path
    has_projects: bool

    def make(self) -> Path:
        """A tree of every kind of thing."""
        tree = self.below / "tree"
        sub, deep = tree / "sub", tree / "sub" / "deep"
        deep.mkdir(parents=True)
        os.setxattr(sub, DEFAULT, NAMED)
        if self.has_projects:
            set_project(deep, PROJECT)
        for directory in (tree, sub, deep):
            for number in range(N_RESTORED):
                self._make_file(directory / f"file{number}", number)
            (directory / "link").symlink_to("file0")
            os.chown(directory / "link", 3, 4, follow_symlinks=False)
            os.mkfifo(directory / "fifo", 0o620)
            os.link(directory / "file1", directory / "again")
        os.link(deep / "file2", tree / "from-deep")
        for directory, mode in ((deep, 0o2711), (sub, 0o1773), (tree, 0o750)):
            os.chown(directory, 5, 6)
            directory.chmod(mode)
            os.utime(directory, ns=(1_000_000_001, 2_000_000_002 + mode))
        return self.top / "tree"

    def _make_file(self, path: Path, number: int) -> None:
        with path.open("wb") as file:
            file.write(os.urandom(1 + number * 1000))
            file.truncate(number * 10_000 + 1)
        os.chown(path, 10 + number, 20 + number)
        path.chmod(0o4600 + number)
        os.setxattr(path, "user.number", b"%d" % number)
        if number % 3 == 0:
            os.setxattr(path, ACCESS, NAMED)
        os.utime(path, ns=(1_234_567_891 + number, 9_876_543_219 + number))

    def look(self, top: str = "tree") -> dict[str, tuple[object, ...]]:
        """All that there is of a tree below, by path."""
        for _ in range(2):  # to look at it for the first time changes times of access
            found = dict(self._look(self.below / top))
        return found

    def _look(self, top: Path) -> Iterator[tuple[str, tuple[object, ...]]]:
        with os.scandir(top) as listed:
            below = sorted(Path(entry) for entry in listed)
        for path in (top, *below):
            attributes = stat_at(AT_FDCWD, os.fsencode(path))
            yield str(path.relative_to(self.below)), (*attributes, *self._inside(path))
            if path is not top and stat.S_ISDIR(attributes.mode):
                yield from self._look(path)

    def _inside(self, path: Path) -> tuple[object, ...]:
        # The mark of a restore is all that it adds (linux/xattrs.py).
        names = sorted(set(os.listxattr(path, follow_symlinks=False)) - {*RESTORED_XATTRS})
        xattrs = [(name, os.getxattr(path, name, follow_symlinks=False)) for name in names]
        kind = stat.S_IFMT(path.lstat().st_mode)
        if kind == stat.S_IFLNK:
            return xattrs, os.readlink(path), None
        project = project_of(path) if self.has_projects and kind != stat.S_IFIFO else None
        if kind != stat.S_IFREG:
            return xattrs, None, project
        fd = os.open(path, os.O_RDONLY | os.O_NOATIME)
        try:
            return xattrs, os.pread(fd, 1 << 20, 0), project
        finally:
            os.close(fd)


@pytest.fixture(params=["native", "exclusive", "shared", "slow"])
def place(volume: Path, request: pytest.FixtureRequest) -> Iterator[Place]:
    source = volume / request.node.name.replace("/", "-")
    source.mkdir()
    init(source)
    has_projects = "xfs" in request.node.name
    if request.param == "native":
        yield Place(source, source, has_projects)
    else:
        options = {"slow": ["coherence=exclusive", "backing=slow"]}.get(request.param, [f"coherence={request.param}"])
        with trashd_mount(source, options=options) as mounted:
            yield Place(mounted.path, source, has_projects)
    assert_silent(source)


MOVED = ("ctime_ns", "atime_ns")
"""What a rename changes of what is renamed, and who looks at it afterwards (relatime)."""
MARKED = ("blocks",)  # the mark of a restore may take a block of its own
EXCHANGED = ("mtime_ns", *MOVED)
"""What an exchange does: an xfs gives both directories a new mtime as well."""
EMPTIED = ("nlink", "size", "blocks", "mtime_ns", *MOVED)
"""What changes of a directory that loses entries, and of what loses a link."""
FIELDS = ("dev", "ino", "mode", "nlink", "uid", "gid", "rdev", "size", "blocks", "blksize", "atime_ns", "mtime_ns",
          "ctime_ns", "btime_ns", "xattrs", "content", "project")  # fmt: skip


def assert_same(
    seen: dict[str, tuple[object, ...]], before: dict[str, tuple[object, ...]], but: dict[str, tuple[str, ...]]
) -> None:
    """Path by path. but: what may differ, by path"""
    for path, right in before.items():
        left_out = but.get(path, ())
        wrong = [
            (name, one, other)
            for name, one, other in zip(FIELDS, seen[path], right, strict=True)
            if one != other and name not in left_out
        ]
        assert (path, wrong) == (path, [])


@WITH_XFS
def test_a_swapped_tree_comes_back_as_it_was(place: Place) -> None:
    tree = place.make()
    before = place.look()
    swapped = swap(tree)
    restore(place.top, swapped.id)
    seen = place.look()
    assert seen.keys() == before.keys()
    assert_same(seen, before, {"tree": (*EXCHANGED, *MARKED)})


@WITH_XFS
def test_a_dropped_tree_comes_back_as_it_was(place: Place) -> None:
    tree = place.make()
    before = place.look()
    drop = place.top / ".trashd" / "u" / "0" / "drop"
    drop.mkdir(exist_ok=True)
    tree.rename(drop / "tree")
    assert recover_all(place.below) == []
    (entry,) = entries(place.top)
    restore(place.top, entry.id, to=tree)
    seen = place.look()
    assert seen.keys() == before.keys()
    assert_same(seen, before, {"tree": (*MOVED, *MARKED)})


@WITH_XFS
@pytest.mark.parametrize("part", ["sub/deep", "sub/deep/file3", "sub", "link"])
def test_a_part_comes_back_as_it_was(place: Place, part: str) -> None:
    tree = place.make()
    before = {path: right for path, right in place.look().items() if f"{path}/".startswith(f"tree/{part}/")}
    swapped = swap(tree)
    restore(place.top, swapped.id, inside=os.fsencode(part))
    seen = {path: one for path, one in place.look().items() if f"{path}/".startswith(f"tree/{part}/")}
    assert seen.keys() == before.keys()
    assert_same(seen, before, {f"tree/{part}": (*MOVED, *MARKED)})
    reap_now(place.below, swapped.id)


@WITH_XFS
@pytest.mark.parametrize("n", [3, 7, 20])
def test_what_is_left_of_a_half_reaped_tree_is_as_it_was(place: Place, n: int) -> None:
    tree = place.make()
    before = place.look()
    swapped = swap(tree)
    in_child(partial(reap_now, place.below, swapped.id, Kernel(DyingAfter("unlink", n))))
    assert restore(place.top, swapped.id).partial
    seen = place.look()
    assert 0 < len(seen) < len(before)
    lost = before.keys() - seen.keys()
    linked = {before[path][:2] for path in lost}
    but: dict[str, tuple[str, ...]] = {str(Path(path).parent): EMPTIED for path in lost}
    but |= {path: ("nlink", *MOVED) for path in seen if before[path][:2] in linked}
    but["tree"] = (*EMPTIED, *MARKED)
    # Killed in a directory of another, or one that others write in, the reaper leaves it root's and closed: else what
    # came in meanwhile could not be told from what the reaper had begun
    # (docs/internals/decisions/0025-late-arrivals.md).
    mode, uid = FIELDS.index("mode"), FIELDS.index("uid")
    taken = {path for path in seen if seen[path][uid] == 0 != before[path][uid] and path != "tree"}
    assert {seen[path][mode] for path in taken} <= {stat.S_IFDIR | 0o700}
    but |= {path: (*but.get(path, ()), "mode", "uid") for path in taken}
    assert_same(seen, {path: before[path] for path in seen}, but)
