"""What the service costs when nothing happens, and how it does when very much waits.

idle   an empty store for a minute: processor time, wake-ups and memory of all its processes
queue  100,000 orphans: until it is ready, until the first is gone, a look at the status, memory, until all are gone
fair   somebody's ten files behind another's tree of a million, in a loop: how long they wait

It runs the real command in directories of its own: a tmpfs lies over /run/trashd meanwhile.
"""

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import MappingProxyType

from bench.runner import Bed, Benchmark, Case, Turn
from bench.support import TRASHD, make_tree, time_command, volume
from bench.verdicts import Target, value
from fusefs.core.service_status import VolumePhase
from fusefs.store.stage import SwapOptions
from tests.support.other_users import as_user
from tests.support.service_process import Service, places, service
from tests.support.small_orphans import many_orphans
from tests.support.store_verbs import init, swap

N_QUEUED, N_BIG, N_SMALL, N_LOOKS = 100_000, 1_000_000, 10, 9
_BIG, _SMALL = 1001, 1002
_EVERY_S = 0.005
_DUE = SwapOptions(0, "")
_HZ = os.sysconf("SC_CLK_TCK")
LIMITS = MappingProxyType(
    {
        "idle": {"cpu %": 0.1, "wake-ups in 30 s": 0.5, "MiB": 35.0},
        "queue": {"until ready": 5.0, "status": 0.3},
        "fair": {"": 2.0},
    }
)


def _processes(one: Service) -> list[int]:
    """Of the service: itself, the forker, children and their workers."""
    found = [one.process.pid]
    for pid in found:
        with contextlib.suppress(OSError):
            found += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split())
    return found


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _HZ


def _switches(pid: int) -> int:
    """How often it went to sleep by itself: once for each time that it was woken."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))


def _pss_mib(pids: list[int]) -> float:
    """Memory of all together: what they share counts once."""
    sizes = []
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
            sizes.append(int(next(line for line in lines if line.startswith("Pss:")).split()[1]))
    return sum(sizes) / 1024


def _until(one: Service, condition: Callable[[], object]) -> float:
    """Seconds until something is true, to 5 ms."""
    began = time.monotonic()
    while not condition():
        assert one.process.poll() is None, one.log.read_text(encoding="utf-8")
        time.sleep(_EVERY_S)
    return time.monotonic() - began


@contextmanager
def idle(base: Path, root: Path, seconds: int) -> Iterator[Turn]:
    """An empty store, as the service is for most of its life."""
    with service(base, root) as one:
        one.until_phase(root, VolumePhase.IDLE)
        time.sleep(15.0)  # trio keeps a thread for ten seconds after its last use

        def turn() -> dict[str, float]:
            pids = _processes(one)
            cpu_s, switches = sum(map(_cpu_s, pids)), sum(map(_switches, pids))
            time.sleep(seconds)
            cpu_s, switches = sum(map(_cpu_s, pids)) - cpu_s, sum(map(_switches, pids)) - switches
            return {
                "cpu %": cpu_s / seconds * 100,
                "wake-ups in 30 s": switches / seconds * 30,
                "MiB": _pss_mib(_processes(one)),
            }

        yield turn


@contextmanager
def queue(base: Path, root: Path, n_queued: int) -> Iterator[Turn]:
    """Very many orphans at once."""
    states = [root / ".trashd/u/0" / state for state in ("orphans", "reaping")]

    def turn() -> dict[str, float]:
        many_orphans(root, n_queued)
        began = time.monotonic()
        with service(base, root) as one:
            ready_s = time.monotonic() - began
            first_s = ready_s + _until(one, lambda: one.volume(root).n_reaped)
            status_s = [time_command([TRASHD, "status"]) for _ in range(N_LOOKS)]
            pss_mib = 0.0
            while any(os.listdir(state) for state in states):
                pss_mib = max(pss_mib, _pss_mib(_processes(one)))
                time.sleep(0.5)
            each_s = (time.monotonic() - began - ready_s) / n_queued
        return {
            "until ready": ready_s,
            "until the first is gone": first_s,
            "status": statistics.median(status_s),
            "MiB": pss_mib,
            "each": each_s,
        }

    yield turn


@contextmanager
def fair(base: Path, root: Path, n_big: int) -> Iterator[Turn]:
    """A user with next to nothing behind one with very much; no figure once that is gone."""
    for uid in (_BIG, _SMALL):
        home = root / str(uid)
        home.mkdir()
        os.chown(home, uid, uid)

    def throw_away(uid: int, n_files: int) -> None:
        victim = root / str(uid) / "job"
        make_tree(victim, n_files)
        swap(victim, options=_DUE)
        victim.rmdir()

    as_user(_BIG, lambda: throw_away(_BIG, n_big))
    big, small = (root / f".trashd/u/{uid}" for uid in (_BIG, _SMALL))
    with service(base, root) as one:
        _until(one, lambda: os.listdir(big / "reaping"))

        def turn() -> dict[str, float]:
            as_user(_SMALL, lambda: throw_away(_SMALL, N_SMALL))
            waited_s = _until(one, lambda: not (os.listdir(small / "orphans") or os.listdir(small / "reaping")))
            return {"": waited_s} if os.listdir(big / "reaping") else {}

        yield turn


Part = Callable[[Path, Path, int], AbstractContextManager[Turn]]
PARTS = MappingProxyType[str, Part]({"idle": idle, "queue": queue, "fair": fair})


@contextmanager
def bed(case: Case) -> Iterator[Bed]:
    """A volume for one part."""
    part, filesystem = case.words
    with volume(filesystem) as root, places() as base:
        init(root)
        with PARTS[part](base, root, case.n) as turn:
            yield Bed({part: turn})


def _targets(case: Case) -> Sequence[Target]:
    part = case.words[0]
    units = {"cpu %": " %", "MiB": " MiB", "wake-ups in 30 s": ""}
    return [
        Target(name or "waits", value(f"{part}, {name}" if name else part), limit, unit=units.get(name, " s"))
        for name, limit in LIMITS[part].items()
    ]


BENCHMARK = Benchmark(
    "service",
    "what the service costs when nothing happens, and how it does when very much waits",
    (Case(("idle", "ext4"), 60, least=1), Case(("queue", "ext4"), N_QUEUED, least=1), Case(("fair", "ext4"), N_BIG)),
    (Case(("idle", "ext4"), 15, least=1), Case(("queue", "tmpfs"), 10_000, least=1), Case(("fair", "ext4"), 200_000)),
    bed,
    _targets,
)
