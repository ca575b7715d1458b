"""What commands cost in processor time beside their rivals, quickly: what CI holds against what is stored.

Processor time of a command, its workers' included, is in ratio much the same on a busy machine as on an idle one, where
what a person waits for is not. Everything is small and in memory.
"""

import json
import os
import resource
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from types import MappingProxyType

from bench.estimates import Estimate, estimate
from bench.runner import Bed, Benchmark, Case, Turn
from bench.support import PYTHON, TRASHD, make_flat, only_orphan, running, wait
from bench.verdicts import Round, Target, times
from tests.support.real_filesystems import tmpfs_volume

INTERPRETER, RM, FIND, XARGS = "python3 -c pass", "rm -rf", "find -delete", "xargs rm"
SWAP, RESTORE, REAP, BY_NAME, BY_SIZE, NAMES = "swap", "restore", "reap", "sweep by name", "sweep by size", "rm -0"
_OURS = "trashd"
RIVALS = MappingProxyType(
    {
        f"{_OURS}, {SWAP}": INTERPRETER,
        f"{_OURS}, {RESTORE}": INTERPRETER,
        f"{_OURS}, {REAP}": RM,
        BY_NAME: FIND,
        BY_SIZE: FIND,
        NAMES: XARGS,
    }
)
_LIMIT_S = 60.0
Command = Sequence[str | Path]


def used_s(command: Command, stdin: Path = Path("/dev/null")) -> float:
    """Seconds of processor time of a command and of all that it has waited for.

    Raises  OSError if it fails
    """
    before_s = _children_s()
    with open(os.devnull, "wb") as null, running(command, stdin, null.fileno()) as pid:
        code = wait(pid, _LIMIT_S)
    if code:
        raise OSError(f"{command[0]}: exit code {code}")
    return _children_s() - before_s


def _children_s() -> float:
    """Not in ticks of a clock, as os.times has it."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class _Volume:
    """Where it is done; each turn makes what it needs, under a new name."""

    def __init__(self, root: Path, n_files: int) -> None:
        self._root = root
        self._n_files = n_files
        self._numbers = count()

    def make(self) -> Path:
        """A directory with all the files."""
        victim = self._root / f"victim{next(self._numbers)}"
        make_flat(victim, self._n_files)
        return victim

    def cycle(self) -> dict[str, float]:
        """Of the commands that swap a directory, take it back, and remove what was swapped once more."""
        victim = self.make()
        found = {SWAP: used_s([TRASHD, "swap", victim])}
        found[RESTORE] = used_s([TRASHD, "restore", "--volume", self._root, only_orphan(self._root)])
        used_s([TRASHD, "swap", victim])
        found[REAP] = used_s([TRASHD, "reap", "--now", "--volume", self._root, only_orphan(self._root)])
        victim.rmdir()
        return found

    def measure_command(self, *words: str) -> float:
        """Return the processor time of a command that empties or removes a directory; `{}` stands for the directory."""
        victim = self.make()
        seconds = used_s([word.format(victim) for word in words])
        used_s(["rm", "-rf", victim])
        return seconds

    def measure_list_command(self, *words: str) -> float:
        """Return the processor time of a command that reads the names that it removes."""
        victim = self.make()
        listed = self._root / "listed"
        listed.write_bytes(b"".join(os.fsencode(path) + b"\0" for path in sorted(victim.iterdir())))
        seconds = used_s(words, listed)
        used_s(["rm", "-rf", victim])
        used_s([TRASHD, "reap", "--all", "--now", "--yes", "--volume", self._root])
        return seconds


@contextmanager
def bed(case: Case) -> Iterator[Bed]:
    """A volume in memory with a store."""
    with tmpfs_volume("512m", ("nr_inodes=0",)) as root:
        used_s([TRASHD, "init", root])
        volume = _Volume(root, case.n)
        turns: dict[str, Turn] = {
            INTERPRETER: lambda: used_s([PYTHON, "-c", "pass"]),
            RM: partial(volume.measure_command, "rm", "-rf", "{}"),
            _OURS: volume.cycle,
            FIND: partial(volume.measure_command, "find", "{}", "-type", "f", "-delete"),
            BY_NAME: partial(volume.measure_command, TRASHD, "sweep", "{}", "--name", "f*", "--delete"),
            BY_SIZE: partial(volume.measure_command, TRASHD, "sweep", "{}", "--size", "-1M", "--delete"),
            XARGS: partial(volume.measure_list_command, "xargs", "-0", "rm"),
            NAMES: partial(volume.measure_list_command, TRASHD, "rm", "-0"),
        }
        yield Bed(turns)


CASE = Case(("tmpfs",), 5000)
BENCHMARK = Benchmark(
    "cost",
    "processor time of commands beside their rivals; CI holds it against bench/stored",
    (CASE,),
    (CASE,),
    bed,
    lambda _case: stored_targets(),
)
STORED = Path(__file__).with_name("stored") / "ratios.json"
RATIOS = MappingProxyType({f"{ours} / {rival}": times(ours, rival) for ours, rival in RIVALS.items()})
WARN, FAR_BEYOND = 3.0, 10.0
"""Times the upper end of the stored interval: CI tells of the first, and fails at the second."""


def stored() -> Mapping[str, Estimate]:
    """What each ratio was when it was written there."""
    found = json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else {}
    return {ratio: Estimate(**each) for ratio, each in found.items()}


def store(rounds: Sequence[Round]) -> None:
    """Write there what these say."""
    found = {ratio: estimate(of(rounds))._asdict() for ratio, of in RATIOS.items()}
    STORED.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def stored_targets(limit: float = WARN) -> list[Target]:
    """None may be worse than so many times the upper end of what it was."""
    before = stored()
    return [Target(ratio, of, before[ratio].high * limit) for ratio, of in RATIOS.items() if ratio in before]
