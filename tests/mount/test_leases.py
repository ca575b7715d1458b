"""A request that waits for a lease at the backing path keeps no other waiting, and succeeds in the end."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from fusefs.core.metadata_cache import ROOT
from fusefs.linux.inotify import open_inotify, read_events
from fusefs.linux.mountinfo import DAEMON_GONE
from tests.support.background_mounts import backing_of
from tests.support.background_processes import LIMIT_S, clients, ends, in_time, is_ended
from tests.support.busy_clients import work
from tests.support.file_leases import is_broken_into, write_lease
from tests.support.foreground_mount import SHARED_LIMIT_S, Mounted, trashd_mount, until
from tests.support.real_filesystems import loop_volume
from tests.support.transports import cases
from tests.support.trashd_command import trashd
from tests.support.vfs_without_mount import Files, Names, Somebody, vfs_at

pytestmark = pytest.mark.needs("root", "fuse", "loop")

WHERE = {
    "elsewhere": ["coherence=shared"],
    "over itself": ["coherence=exclusive"],
    "over io_uring": ["coherence=exclusive", "uring=on"],
    "plain": ["coherence=exclusive", "engine=plain"],
    "slow": ["coherence=exclusive", "backing=slow"],
}
IN_OPEN = 0x20


class Place(NamedTuple):
    """A mount with a file that is leased, and others."""

    mounted: Mounted
    seen: Path
    behind: Path

    def is_waited_for(self) -> bool:
        return until(lambda: is_broken_into((self.behind / "leased").stat()), LIMIT_S)


@contextmanager
def served(how: str, *, expect_end: bool = False, limit_s: float = 90) -> Iterator[Place]:
    with loop_volume("ext4", 64) as volume:
        source = volume / "source"
        fill(source)
        point = source if how == "over itself" else None
        with trashd_mount(source, point, WHERE[how], limit_s=limit_s, expect_end=expect_end) as mounted:
            behind = backing_of(source) if point else source
            yield Place(mounted, mounted.path, behind)


def fill(directory: Path) -> None:
    directory.mkdir()
    for name in ("leased", f"{directory.name}-0", f"{directory.name}-1"):
        (directory / name).write_bytes(b"content")


@pytest.fixture(scope="module", params=cases(WHERE))
def served_for_all(request: pytest.FixtureRequest) -> Iterator[Place]:
    with served(request.param, limit_s=SHARED_LIMIT_S) as place:
        yield place


@pytest.fixture
def place(served_for_all: Place, own_name: str) -> Place:
    mounted, seen, behind = served_for_all
    fill(behind / own_name)
    return Place(mounted, seen / own_name, behind / own_name)


def cut(path: Path) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_TRUNC))


WAITING: dict[str, Callable[[Path], object]] = {
    "read": Path.read_bytes,
    "append": lambda path: os.close(os.open(path, os.O_WRONLY | os.O_APPEND)),
    "open with truncation": cut,
    "truncate": lambda path: os.truncate(path, 0),
}


@pytest.mark.parametrize("act", WAITING)
def test_who_waits_for_a_lease_keeps_nobody_else_waiting(place: Place, act: str) -> None:
    with (
        write_lease(place.behind / "leased") as give_up,
        clients([lambda: WAITING[act](place.seen / "leased")]) as (client,),
    ):
        assert place.is_waited_for()
        in_time(partial(work, place.seen))
        assert not is_ended(client)
        give_up()
        assert ends(client) == 0
    size = (place.behind / "leased").stat().st_size
    assert size == (0 if "trunc" in act else len(b"content"))


@pytest.mark.parametrize("act", WAITING)
def test_who_is_killed_while_he_waits_ends(place: Place, act: str) -> None:
    """And what it waited for is not kept: the daemon has as many fds as before, says the mount's own end."""
    with (
        write_lease(place.behind / "leased"),
        clients([lambda: WAITING[act](place.seen / "leased")]) as (client,),
    ):
        assert place.is_waited_for()
        os.kill(client, signal.SIGKILL)
        assert ends(client) == -signal.SIGKILL
        in_time(partial(work, place.seen))
    assert (place.behind / "leased").read_bytes() == b"content"


@pytest.mark.usefixtures("short_patience")
@pytest.mark.parametrize("how", cases(WHERE))
def test_umount_force_lets_who_waits_go(how: str) -> None:
    with (
        served(how, expect_end=True) as place,
        write_lease(place.behind / "leased"),
        clients([(place.seen / "leased").read_bytes]) as (client,),
    ):
        assert place.is_waited_for()
        done = trashd("umount", "--force", place.seen)
        assert done.code == 0, done.err
        assert ends(client) in DAEMON_GONE


@pytest.mark.long
@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC])
def test_what_has_the_name_by_now_is_not_opened_unless_it_is_that_file(
    tmp_path: Path, flags: int, is_shared: bool
) -> None:
    """Its open might do something, or wait: users behind the mount may put a FIFO or a device there."""
    file, fifo = tmp_path / "file", tmp_path / "fifo"
    file.touch()
    os.mkfifo(fifo)
    with vfs_at(tmp_path, is_shared=is_shared) as vfs, open_inotify() as opened:
        me = Somebody(0, 0, os.getpid(), 0)
        nodeid = Names(vfs).lookup(ROOT, b"file", me).nodeid
        fifo.rename(file)
        assert ctypes.CDLL(None).inotify_add_watch(int(opened), os.fsencode(file), IN_OPEN) > 0
        with pytest.raises(OSError, match="Stale"):
            Files(vfs).open(nodeid, flags, me)
        assert read_events(opened) == []
