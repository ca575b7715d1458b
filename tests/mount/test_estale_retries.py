"""A process that uses a name which others unlink and make all the time never gets ESTALE, as elsewhere."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import trio

from fusefs.core.metadata_cache import ROOT
from fusefs.linux.fd import Fd
from fusefs.mount.tree.vfs import Vfs
from tests.support.background_processes import workers
from tests.support.fake_dev_fuse import Files, Names, Somebody, vfs_at
from tests.support.foreground_mount import SHARED_LIMIT_S, fresh_mount
from tests.support.open_fds import open_fds
from tests.support.oracle_subjects import outcome
from tests.support.real_filesystems import tmpfs_volume

pytestmark = pytest.mark.needs("root", "fuse")

N_ASKERS, LIMIT_S = 3, 60
MODES = {
    "a plain directory": None,
    "mounted": ["coherence=exclusive"],
    "mounted shared": ["coherence=shared"],
    "mounted slow": ["coherence=exclusive", "backing=slow"],
}


@pytest.fixture(scope="module", params=MODES.values(), ids=list(MODES))
def top(request: pytest.FixtureRequest) -> Iterator[Path]:
    if request.param is None:
        with tmpfs_volume() as volume:
            yield volume
    else:
        with fresh_mount(*request.param, limit_s=SHARED_LIMIT_S) as mounted:
            yield mounted.path


def create(file: Path) -> None:
    os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o644))


def answers(act: Callable[[Path], object], file: Path, n_each: int) -> set[str]:
    """All that some are told who do the same, each until the file was there so often."""
    told, tell = os.pipe()

    def ask() -> None:
        found: list[str] = []
        while len(found) - found.count("ENOENT") < n_each:
            found.append(outcome(act, file))
        os.write(tell, b"%s\n" % " ".join(set(found)).encode())
        signal.pause()

    def unlink() -> None:
        while True:
            with suppress(FileNotFoundError):
                file.unlink()

    def make() -> None:
        while True:
            create(file)

    try:
        with workers([unlink, make, *[ask] * N_ASKERS]), os.fdopen(told, "rb") as lines:
            return {word for _ in range(N_ASKERS) for word in lines.readline().decode().split()}
    finally:
        os.close(tell)


MAKES: dict[str, Callable[[Path], object]] = {
    "create": create,
    "create or empty": lambda file: os.close(os.open(file, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)),
}
USES: dict[str, Callable[[Path], object]] = {
    "read": lambda file: os.close(os.open(file, os.O_RDONLY)),
    "empty": lambda file: os.truncate(file, 0),
    "change mode": lambda file: file.chmod(0o600),
}


@pytest.mark.parametrize("act", MAKES)
def test_who_makes_a_file_or_opens_it_always_can(top: Path, act: str) -> None:
    assert answers(MAKES[act], top / "file", 100) == {"None"}


@pytest.mark.parametrize("act", USES)
def test_a_file_is_there_or_not(top: Path, act: str) -> None:
    assert answers(USES[act], top / "file", 25) <= {"None", "ENOENT"}


# What is held, and for how long.

LOSER, OTHER = (Somebody(0, 0, pid, 0o022) for pid in (4711, 4712))


@pytest.fixture
def vfs() -> Iterator[Vfs]:
    """Of a directory with a file; one thread of a client's has lost."""
    with tmpfs_volume() as volume:
        (volume / "file").write_bytes(b"content")
        (volume / "directory").mkdir()
        (volume / "link").symlink_to("target")
        with vfs_at(volume, max_fds=0) as vfs:
            vfs.retries.add_process(LOSER.pid)
            yield vfs


def test_what_a_loser_finds_he_opens_though_it_is_unlinked(vfs: Vfs) -> None:
    found = Names(vfs).lookup(ROOT, b"file", LOSER)
    Names(vfs).unlink(ROOT, b"file", OTHER)
    fh = Files(vfs).open(found.nodeid, os.O_RDONLY, LOSER).fh
    assert Files(vfs).read(fh, 0, 99) == b"content"
    Files(vfs).release(fh)


def test_nothing_is_held_for_others(vfs: Vfs) -> None:
    before = open_fds()
    found = Names(vfs).lookup(ROOT, b"file", OTHER)
    assert open_fds() == before
    Names(vfs).unlink(ROOT, b"file", OTHER)
    with pytest.raises(OSError, match="Stale"):
        Files(vfs).open(found.nodeid, os.O_RDONLY, OTHER)


def test_what_is_absent_is_not_held(vfs: Vfs) -> None:
    before = open_fds()
    with pytest.raises(FileNotFoundError):
        Names(vfs).lookup(ROOT, b"absent", LOSER)
    assert open_fds() == before


def test_what_a_loser_is_told_is_absent_is_not_found_the_next_moment(vfs: Vfs, monkeypatch: pytest.MonkeyPatch) -> None:
    """What appeared just then would not be held."""
    look = vfs.retries.open_name

    def look_before_it_appears(pid: int, dir_fd: Fd, name: bytes) -> Fd | None:
        try:
            return look(pid, dir_fd, name)
        finally:
            os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644, dir_fd=dir_fd))

    monkeypatch.setattr(vfs.retries, "open_name", look_before_it_appears)
    with pytest.raises(FileNotFoundError):
        Names(vfs).lookup(ROOT, b"late", LOSER)


def test_whatever_a_loser_finds_answers_though_it_is_removed(vfs: Vfs) -> None:
    for name, remove in ((b"link", Names(vfs).unlink), (b"directory", Names(vfs).rmdir)):
        found = Names(vfs).lookup(ROOT, name, LOSER)
        remove(ROOT, name, OTHER)
        assert not list(Files(vfs).listxattr(found.nodeid, LOSER))
        if name == b"link":
            assert Names(vfs).readlink(found.nodeid, LOSER) == b"target"


def test_who_has_long_tried_again_does_so_no_more(vfs: Vfs) -> None:
    """Nobody says when he has what he wanted, nor need another request come; as long as he tries, the native core does
    nothing for him, and what he found keeps its filesystem from being unmounted."""
    before = open_fds()
    Names(vfs).lookup(ROOT, b"file", LOSER)
    assert len(open_fds()) == len(before) + 1

    async def until_none_is_left() -> None:
        with trio.fail_after(LIMIT_S):
            while len(vfs.retries):
                await trio.sleep(0.01)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(vfs.retries.expire_until_cancelled)
            await until_none_is_left()
            await trio.to_thread.run_sync(vfs.retries.add_process, OTHER.pid)
            assert OTHER.pid in vfs.retries
            await until_none_is_left()
            nursery.cancel_scope.cancel()

    trio.run(main)
    assert open_fds() == before


def test_what_was_opened_is_held_no_more(vfs: Vfs) -> None:
    before = open_fds()
    found = Names(vfs).lookup(ROOT, b"file", LOSER)
    Files(vfs).release(Files(vfs).open(found.nodeid, os.O_RDONLY, LOSER).fh)
    assert open_fds() == before


def test_what_the_kernel_forgets_is_held_no_more(vfs: Vfs) -> None:
    before = open_fds()
    found = Names(vfs).lookup(ROOT, b"file", LOSER)
    Names(vfs).unlink(ROOT, b"file", OTHER)
    Names(vfs).forget(found.nodeid, 1)
    assert open_fds() == before


def test_who_is_let_go_of_what_he_found_has_not_found_it_yet(vfs: Vfs) -> None:
    """The kernel looks to see whether what it knows is right still, lets go of what it finds, and looks once more."""
    Names(vfs).forget(Names(vfs).lookup(ROOT, b"file", LOSER).nodeid, 1)
    found = Names(vfs).lookup(ROOT, b"file", LOSER)
    Names(vfs).unlink(ROOT, b"file", OTHER)
    Files(vfs).release(Files(vfs).open(found.nodeid, os.O_RDONLY, LOSER).fh)


def test_one_file_is_held_for_each_loser_and_for_some_of_them_alone(vfs: Vfs) -> None:
    before, n_losers_max = open_fds(), 64
    for pid in range(10, 10 + 2 * n_losers_max):
        vfs.retries.add_process(pid)
        for _ in range(3):
            Names(vfs).lookup(ROOT, b"file", Somebody(0, 0, pid, 0o022))
    assert len(vfs.retries) == n_losers_max
    assert len(open_fds()) == len(before) + n_losers_max
