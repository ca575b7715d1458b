"""What clients see of a tree that is swapped, restored, swapped again and reaped under them: what they see natively.

Four of them are at work in it all the time, each with a file open and mapped, a directory open and a working directory
there. None of what they do by these may fail as long as the tree stands, wherever it stands. After each step they tell
what they see, and the same is done to a plain directory: by renameat2 and rm.
"""

from __future__ import annotations

import errno
import mmap
import os
import pickle
import select
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import pytest

from fusefs.linux.syscalls import AT_FDCWD, RENAME_EXCHANGE, renameat2
from tests.support.foreground_mount import trashd_mount, until
from tests.support.oracle_subjects import outcome
from tests.support.real_filesystems import loop_volume
from tests.support.store_verbs import init, reap_now, restore, swap

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

        stands  else where it was is told on by a mount (docs/mount.md)
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
        self._told = [self._hear(hears) for _, hears in pipes]

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
    """What all see after each step. reaped: what they are to see in the end, sooner or later (docs/mount.md)"""
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
