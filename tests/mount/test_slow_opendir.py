"""A directory whose listing is remembered is not opened below until something has to be read: no client can tell."""

import itertools
import os
import shutil
import time
from collections.abc import Iterator
from functools import partial

import pytest

from fusefs.linux.fd import Fd
from fusefs.linux.getdents import Dirents
from tests.support.acls import ACCESS
from tests.support.open_files import errno_of, opened
from tests.support.other_users import as_user
from tests.support.slow_mounts import SLOW, N, SlowMount, slow_mount

pytestmark = [pytest.mark.needs("root", "fuse"), pytest.mark.takes_engine]


@pytest.fixture
def both() -> Iterator[SlowMount]:
    with slow_mount(SLOW, ttl_s=0) as found:
        yield found


def n_opened(both: SlowMount) -> int:
    """How often a directory was opened below."""
    return both.volume.n_messages.get("opendir", 0)


def remember(both: SlowMount) -> None:
    """Only the daemon does."""
    os.listdir(both.top)
    both.forget_all()


def test_what_is_remembered_is_listed_without_opening_it(both: SlowMount) -> None:
    remember(both)
    before = n_opened(both)
    assert sorted(os.listdir(both.top)) == sorted(os.listdir(both.backing))
    assert n_opened(both) == before


def test_what_changes_while_it_is_open_is_seen(both: SlowMount) -> None:
    remember(both)
    with opened(both.top, os.O_RDONLY | os.O_DIRECTORY) as fd:
        (both.top / "new").touch()
        assert "new" in os.listdir(fd)
        (both.top / "new").unlink()
        assert sorted(os.listdir(fd)) == sorted(os.listdir(both.backing))


def test_its_names_are_made_durable(both: SlowMount) -> None:
    remember(both)
    with opened(both.top, os.O_RDONLY | os.O_DIRECTORY) as fd:
        before = both.volume.n_messages.get("fsyncdir", 0)
        os.fsync(fd)
        assert both.volume.n_messages["fsyncdir"] > before
        os.fdatasync(fd)


def test_it_may_be_moved_and_removed_while_it_is_open(both: SlowMount) -> None:
    remember(both)
    with opened(both.top, os.O_RDONLY | os.O_DIRECTORY) as fd:
        both.top.rename(both.top.with_name("moved"))
        assert len(os.listdir(fd)) == N
        os.fsync(fd)
        shutil.rmtree(both.top.with_name("moved"))
        assert os.fstat(fd).st_nlink == 0
        assert os.listdir(fd) == []


def test_what_is_gone_behind_the_mount_is_told_to_be(both: SlowMount) -> None:
    remember(both)
    with opened(both.top, os.O_RDONLY | os.O_DIRECTORY) as fd:
        shutil.rmtree(both.backing)
        (both.mounted.path / "other").mkdir()
        assert errno_of(lambda: os.fsync(fd)) >= 0  # whatever it says: no client waits, and the daemon lives
    assert (both.mounted.path / "other").is_dir()


@pytest.mark.parametrize("is_remembered", [False, True])
def test_who_goes_back_is_told_what_was_told_before_and_nothing_is_read_again(*, is_remembered: bool) -> None:
    """As the kernel does when it has lost what it kept of a listing."""
    with slow_mount(SLOW, ttl_s=0) as both:
        if is_remembered:
            remember(both)
        with opened(both.top, os.O_RDONLY | os.O_DIRECTORY) as fd:
            entries = Dirents(Fd(fd))

            def block(offset: int) -> list[tuple[bytes, int, int, int]]:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                return entries.block(offset)

            parts = [block(0)]
            while parts[-1]:
                parts.append(block(parts[-1][-1][2]))
                if len(parts) == 4:  # before the end, and after it
                    again = block(parts[0][-1][2])
                    assert again[: len(parts[1])] == parts[1][: len(again)]
                    assert again
            n_read = both.volume.n_messages.get("readdir", 0)
            for one, following in itertools.pairwise(parts):
                again = block(one[-1][2])  # who has jumped is told few at first
                assert again == following[: len(again)]
                assert bool(again) == bool(following)
            assert both.volume.n_messages.get("readdir", 0) == n_read
        remember(both)
        assert both.volume.n_messages.get("readdir", 0) == n_read
        assert sum(map(len, parts)) == N + 2


def test_who_may_not_read_it_is_refused(both: SlowMount) -> None:
    both.top.chmod(0o711)
    remember(both)
    with pytest.raises(PermissionError):
        as_user(1000, lambda: os.listdir(both.top))
    both.top.chmod(0o755)
    assert len(as_user(1000, lambda: os.listdir(both.top))) == N


@pytest.mark.parametrize("options", [["cache_size=0"], ["timeout=0"], ["cache_size=16K"]], ids=str)
def test_what_is_not_remembered_is_opened(options: list[str]) -> None:
    with slow_mount(SLOW, *options, ttl_s=0) as both:
        remember(both)
        before = n_opened(both)
        assert len(os.listdir(both.top)) == N
        assert n_opened(both) == before + 1


def test_a_listing_read_anew_makes_nobody_ask_for_what_the_kernel_knows(both: SlowMount) -> None:
    """The kernel drops a file's ACL when a listing tells what the file is; so does no listing, of what it was told."""

    def ask_all() -> int:
        for name in os.listdir(both.top):
            path = both.top / name
            path.lstat()
            errno_of(partial(os.getxattr, path, ACCESS))
        return both.mounted.stats().operations["getxattr"].n()

    before = ask_all()
    (both.top / "new").touch()
    (both.top / "new").unlink()
    assert ask_all() - before < N / 10


def test_a_listing_tells_in_full_what_the_kernel_believes_no_more() -> None:
    with slow_mount(SLOW, "timeout=1.5", ttl_s=0) as both:

        def look_at_all() -> int:
            """How often names were looked up for it; read anew, and not as the kernel has it."""
            (both.top / "new").touch()
            (both.top / "new").unlink()
            before = both.mounted.stats().operations["lookup"].n()
            with os.scandir(both.top) as entries:
                for entry in entries:
                    entry.stat(follow_symlinks=False)
            return both.mounted.stats().operations["lookup"].n() - before

        look_at_all()
        time.sleep(2)  # what was told has to grow old
        assert look_at_all() < N / 2
