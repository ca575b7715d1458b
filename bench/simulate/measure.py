"""What is measured: single calls from clients, of which the model is made, and reaps by ranks, which it must predict.

The two sets have different trees, and no time of a reap is in the first one: of a reap it has what is asked for each
directory and each file, which is counted, and the processor time of that.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench.runs import commit, now
from bench.simulate.bed import ServerBed, server_bed, used_s
from bench.simulate.fit import UNCOUNTED
from bench.support import machine, print_progress
from tests.support.mpi_jobs import is_gone, start_ranks

STORED = Path(__file__).parents[1] / "stored"
CALLS, REAPS = STORED / "server_calls.json", STORED / "server_reaps.json"
N_THREADS = (1, 2, 4, 8, 16, 32)
N_SHARING = (1, 2, 4, 8)
N_CLIENTS = (1, 2, 4, 8)
THREADS_A_RANK = 4
ONE_FILE = (0, 1)
COUNTED = {"one file": ONE_FILE, "flat": (0, 300), "directories": (25, 6)}
"""Trees of which it is counted what a reap of them asks: so many directories of so many files."""
HELD_OUT = {"wide": (64, 30), "flat": (0, 600)}
"""Trees whose reaps are timed."""
_EACH, _CHUNK = 60, 20
_POLL_S = 0.005
_LIMIT_S = 300.0
Act = Callable[[str, int], object]


class Share(NamedTuple):
    """What one thread does: names of a directory, as one client sees it."""

    fd: int
    names: Sequence[str]


def stat_name(name: str, fd: int) -> None:
    """Make a call that changes nothing."""
    os.stat(name, dir_fd=fd)


def unlink(name: str, fd: int) -> None:
    """A call that changes a directory; the client asks for the name first."""
    os.unlink(name, dir_fd=fd)


def measure(n_rounds: int) -> None:
    """Both sets, each written where it is stored."""
    with server_bed(max(N_CLIENTS)) as bed:
        _store(CALLS, _calls(bed, n_rounds))
        _store(REAPS, _reaps(bed, n_rounds))


def _store(path: Path, figures: dict[str, Any]) -> None:
    about = {"at": now(), "commit": commit(), "machine": machine(), "filesystem": "slowfs on slowfs on tmpfs"}
    path.write_text(json.dumps({**about, **figures}, indent=1) + "\n", encoding="utf-8")
    print_progress(f"written: {path}")


# Single calls.


def _calls(bed: ServerBed, n_rounds: int) -> dict[str, Any]:
    probe = _Probe(bed)
    rates = {
        name: {
            n: median(_report_rate(f"{name}, {n} threads", probe.own(act, n)) for _ in range(n_rounds))
            for n in N_THREADS
        }
        for name, act in (("look", stat_name), ("unlink", unlink))
    }
    shared = {
        n: median(_report_rate(f"in one directory, {n}", probe.shared(n)) for _ in range(n_rounds)) for n in N_SHARING
    }
    return {
        "look_s": probe.each(stat_name),
        "unlink_s": probe.each(unlink),
        "per_s": rates,
        "known_unlinks_per_s_in_one_directory": shared,
        "counted": {name: _counted(bed, *shape) for name, shape in COUNTED.items()},
    }


def _report_rate(what: str, per_s: float) -> float:
    print_progress(f"{what}: {per_s:.1f}/s")
    return per_s


class _Probe:
    """Calls in fresh directories."""

    def __init__(self, bed: ServerBed) -> None:
        self._bed = bed
        self._numbers = count()

    @contextmanager
    def _shares(self, n: int, n_names: int, *, is_shared: bool) -> Iterator[list[Share]]:
        """Of so many threads: directories of their own on one client, or one directory that each has on a client."""
        self._bed.slow(is_slow=False)
        with ExitStack() as owned:
            shares = []
            place = self._bed.backing / f"probe{next(self._numbers)}"
            place.mkdir()
            for number in range(n):
                directory = place if is_shared else place / str(number)
                directory.mkdir(exist_ok=True)
                names = [f"{number}-{each}" for each in range(n_names)]
                for name in names:
                    os.mknod(directory / name)
                seen = self._bed.clients[number if is_shared else 0].path / directory.relative_to(self._bed.backing)
                fd = os.open(seen, os.O_RDONLY | os.O_DIRECTORY)
                owned.callback(os.close, fd)
                shares.append(Share(fd, names))
            self._bed.slow(is_slow=True)
            yield shares

    def each(self, act: Act) -> list[float]:
        """Seconds of each of some calls, one at a time; the shortest first."""
        with self._shares(1, 2 * _EACH, is_shared=False) as (share,):
            return sorted(_seconds(act, name, share.fd) for name in share.names)

    def own(self, act: Act, n: int) -> float:
        """Calls a second by so many threads of one client, each in a directory of its own."""
        with self._shares(n, _EACH, is_shared=False) as shares:
            return n * _EACH / _time_shares(act, shares)

    def shared(self, n: int) -> float:
        """Unlinks a second in one directory by so many clients, of names that each has asked for before."""
        unlink_s = 0.0
        with self._shares(n, _EACH, is_shared=True) as shares:
            for at in range(0, _EACH, _CHUNK):
                some = [share._replace(names=share.names[at : at + _CHUNK]) for share in shares]
                _time_shares(stat_name, some)
                unlink_s += _time_shares(unlink, some)
        return n * _EACH / unlink_s


def _seconds(act: Act, name: str, fd: int) -> float:
    began_s = time.perf_counter()
    act(name, fd)
    return time.perf_counter() - began_s


def _time_shares(act: Act, shares: Sequence[Share]) -> float:
    """Return the seconds in which parallel threads complete their shares."""

    def work(share: Share) -> None:
        for name in share.names:
            act(name, share.fd)

    threads = [threading.Thread(target=work, args=(share,)) for share in shares]
    began_s = time.perf_counter()
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return time.perf_counter() - began_s


# Reaps.


class _Reaped(NamedTuple):
    """seconds: from the first entries to the last; used_s: of processors, by ranks and mounts, meanwhile"""

    seconds: float
    used_s: float
    looks: int
    changes: int


def _counted(bed: ServerBed, n_directories: int, n_files: int) -> dict[str, Any]:
    found = _reap(bed, 1, n_directories, n_files)
    print_progress(f"counted: {n_directories} directories of {n_files}: {found}")
    return {**found._asdict(), "n_directories": n_directories, "n_files": n_files * max(n_directories, 1)}


def _reaps(bed: ServerBed, n_rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (n_directories, n_files) in HELD_OUT.items():
        n_entries = n_directories + n_files * max(n_directories, 1) + 1
        of_shape: dict[int, list[float]] = {n: [] for n in N_CLIENTS}
        for _ in range(n_rounds):
            for n in N_CLIENTS:  # in turns
                seconds = _reap(bed, n, n_directories, n_files).seconds
                of_shape[n].append(_report_rate(f"{name}, {n} clients", (n_entries - 2 * UNCOUNTED) / seconds))
        found[name] = {"n_directories": n_directories, "n_files": n_files, "entries_per_s": of_shape}
    return {"threads_a_rank": THREADS_A_RANK, "trees": found}


def _reap(bed: ServerBed, n_ranks: int, n_directories: int, n_files: int) -> _Reaped:
    """Have so many ranks, each on a client of its own, reap a fresh tree. Raises  OSError: they did not"""
    identifier = bed.orphan(n_directories, n_files)
    n_entries = n_directories + n_files * max(n_directories, 1) + 1
    bed.slow(is_slow=True)
    before = bed.messages()
    nodes = bed.nodes(n_ranks)
    words = ("reap", "--mpi", "--now", "--threads", str(THREADS_A_RANK), "--volume", nodes.path, identifier)
    job = start_ranks("mpich", n_ranks, *words, nodes=[one.path for one in nodes.mounts], at=nodes.path)
    began_s = ended_s = began_used_s = ended_used_s = 0.0
    least = min(UNCOUNTED, n_entries - 1)
    limit_s = time.monotonic() + _LIMIT_S
    while job.process.poll() is None and time.monotonic() < limit_s:
        n_gone, now_s = bed.messages().since(before).changes, time.monotonic()
        if not began_s and n_gone >= least:
            began_s, began_used_s = now_s, used_s(_pids(bed, job.pids()))
        if began_s and not ended_s and n_gone >= n_entries - least:
            ended_s, ended_used_s = now_s, used_s(_pids(bed, job.pids()))
        time.sleep(_POLL_S)
    done = job.wait()
    if done.code or not is_gone(bed.clients[0].path, identifier):
        raise OSError(f"reap --mpi by {n_ranks}: exit code {done.code}: {done.err}")
    messages = bed.messages().since(before)
    bed.clear()
    return _Reaped(ended_s - began_s, ended_used_s - began_used_s, *messages)


def _pids(bed: ServerBed, ranks: Sequence[int]) -> set[int]:
    return {*ranks, bed.server.fuse.pid, *(one.fuse.pid for one in bed.clients)}
