"""A server with a capacity on this machine, and clients with mounts of their own.

Both are slowfs (tests/support/slowfs.c), one on the other. The server is a mount of a tmpfs that works on so many
requests at a time and takes its time for each; what changes a directory has that directory's lock there, as everywhere.
A client is a mount of the server's mount, and adds the way there and back. So what a reap waits for are the server and
the way, and hardly the processors that all of them share here.
"""

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.support.fuse_slow import SlowVolume, slow_volume
from tests.support.mpi_jobs import RankMounts, store_of_user, swap_by_user
from tests.support.proc_stat import all_stats
from tests.support.real_filesystems import tmpfs_volume

SERVICE_US, WAY_US, N_SLOTS = 6000, 6000, 8
"""What the bed is told. The fit is not: it goes by what calls take."""
_LIMIT_S = 1800.0
_CHANGES = frozenset({"unlink", "rmdir"})


class Messages(NamedTuple):
    """Counts of the requests to the mounts of clients: those that only read, and those that change a directory."""

    reads: int
    changes: int

    def since(self, before: "Messages") -> "Messages":
        """What came after `before`."""
        return Messages(self.reads - before.reads, self.changes - before.changes)


class ServerBed(NamedTuple):
    """The mounts."""

    backing: Path
    server: SlowVolume
    clients: list[SlowVolume]

    def slow(self, *, is_slow: bool) -> None:
        """Let each request take its time; or none, while trees are made."""
        for one, us in ((self.server, SERVICE_US), *((client, WAY_US) for client in self.clients)):
            one.delay(us if is_slow else 0)
            one.delay_all()

    def messages(self) -> Messages:
        """So far, of all clients."""
        found = sum((Counter(one.n_messages) for one in self.clients), Counter[str]())
        n_changes = sum(found[one] for one in _CHANGES)
        return Messages(found.total() - n_changes, n_changes)

    def nodes(self, n: int) -> RankMounts:
        """So many of the clients, for ranks."""
        return RankMounts(self.clients[:n])

    def orphan(self, n_directories: int, n_files: int) -> str:
        """The id of a user's tree that was swapped out, directories of so many files; none: all in one.

        It is made below the mounts: no client knows a name of it.
        """
        self.slow(is_slow=False)
        tree = self.backing / "tree"
        tree.mkdir()
        places = [tree / f"d{number}" for number in range(n_directories)] or [tree]
        for place in places:
            make_files(place, n_files)
        for path, _, names in os.walk(tree):
            os.chown(path, 1001, 1001)
            for name in names:
                os.chown(os.path.join(path, name), 1001, 1001)
        for one in (self.server, *self.clients):
            one.forget_all()
        return swap_by_user(self.clients[0].path / "tree")

    def clear(self) -> None:
        """Take away what the fresh directory is."""
        self.slow(is_slow=False)
        shutil.rmtree(self.backing / "tree", ignore_errors=True)


def make_files(place: Path, n: int) -> None:
    """Empty files `f0`, `f1` and so on."""
    place.mkdir(exist_ok=True)
    for number in range(n):
        os.mknod(place / f"f{number}")


@contextmanager
def server_bed(n_clients: int) -> Iterator[ServerBed]:
    """A user's volume on the server, as so many clients have it."""
    with ExitStack() as owned:
        backing = owned.enter_context(tmpfs_volume("512m"))
        os.chown(backing, 1001, 1001)
        server = owned.enter_context(slow_volume(backing, 0, limit_s=_LIMIT_S, n_threads=N_SLOTS))
        clients = [owned.enter_context(slow_volume(server.path, 0, limit_s=_LIMIT_S)) for _ in range(n_clients)]
        store_of_user(clients[0].path)
        bed = ServerBed(backing, server, clients)
        yield bed
        bed.slow(is_slow=False)


def used_s(pids: set[int]) -> float:
    """Seconds of processor time that processes have had."""
    ticks = os.sysconf("SC_CLK_TCK")
    return sum((int(stat[11]) + int(stat[12])) / ticks for pid, stat in all_stats() if pid in pids)
