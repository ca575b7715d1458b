"""What commands cost in system calls, and a mount's operations in messages: the same on a busy machine and an idle one.

Of swap, rm and restore it is all calls that trashd makes, by its own hook before each; of a file that is reaped or
swept, and of what is only done a thousand files long, those of the whole command in one size less those in another.
"""

import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from bench.messages import Messages
from bench.support import TRASHD, make_flat
from fusefs.linux.kernel import Kernel
from tests.support.store_calls import calls_of, remove, restore, swap

N_FEW, N_MORE = 2000, 4000
"""Files; both are more than one buffer of names."""
_LINE = b"x" * 128
N_NAMES = 20

Counts = Mapping[str, int]


def _by_name(calls: Sequence[str]) -> Counts:
    return dict(sorted(Counter(calls).items()))


def of_verbs(parent: Path) -> dict[str, Counts]:
    """The calls of each verb on a tree of ten files, in a folder that is there."""
    for victim in ("first", "removed", "swapped"):
        make_flat(parent / victim, 10)
    swap(parent / "first")
    return {
        "rm": _by_name(calls_of(lambda kernel: remove(parent / "removed", kernel))),
        "swap": _by_name(calls_of(lambda kernel: swap(parent / "swapped", kernel))),
    }


def of_restore(volume: Path) -> Counts:
    """The calls that take a swap back."""
    make_flat(volume / "restored", 10)
    swapped = swap(volume / "restored")

    def act(kernel: Kernel) -> None:
        restore(volume, swapped.id, kernel)

    return _by_name(calls_of(act))


def of_more_files(volume: Path, log: Path) -> dict[str, Counts]:
    """The calls of 2,000 more files that are reaped or swept, or lie in what is swapped."""
    return {
        f"{name} of {N_MORE - N_FEW:,} more files": _difference(volume / name, command, log)
        for name, command in _COMMANDS.items()
    }


def _reap(path: Path) -> list[str | Path]:
    swapped = swap(path)
    return [TRASHD, "reap", "--now", "--threads", "1", "--volume", path.parents[1], swapped.id]


_COMMANDS = MappingProxyType[str, Callable[[Path], list[str | Path]]](
    {
        "swap": lambda path: [TRASHD, "swap", path],
        "reap": _reap,
        "sweep by name": lambda path: [TRASHD, "sweep", path, "--name", "f*", "--delete"],
        "sweep by size": lambda path: [TRASHD, "sweep", path, "--size", "-1M", "--delete"],
    }
)
_RARE = 0.1
"""What comes less often for a file is the interpreter's and the allocator's."""
_WAITS = ("futex", "poll", "ppoll", "epoll_wait", "sched_yield")
"""How many there are depends on who waits for whom."""


def _difference(parent: Path, command: Callable[[Path], list[str | Path]], log: Path) -> Counts:
    parent.mkdir()
    found = []
    for n_files in (10, N_FEW, N_MORE):  # the first one may have to compile what the others find compiled
        victim = parent / str(n_files)
        make_flat(victim, n_files)
        found.append(_traced(command(victim), log))
    _, few, many = found
    more = {call: many[call] - few[call] for call in sorted(many) if call not in _WAITS}
    return {call: n for call, n in more.items() if call == "getdents64" or n >= _RARE * (N_MORE - N_FEW)}


def _traced(command: Sequence[str | Path], log: Path) -> Counter[str]:
    """The calls of a command, of its workers too."""
    strace = ("strace", "-f", "-qq", "--signal=none", "--output", log)
    subprocess.run([*strace, *command], stdin=subprocess.DEVNULL, capture_output=True, check=True)
    return Counter(re.findall(r"^\d+ +(\w+)\(", log.read_text(errors="replace"), re.MULTILINE))


# Messages.


def of_operations(tree: Path, messages: Messages) -> dict[str, Counts]:
    """Of each operation on 20 names, those that each of them takes: what comes once or twice in all does not count."""
    files = [tree / f"f{number}" for number in range(N_NAMES)]
    found = {}
    for name, act in _OPERATIONS.items():
        messages.take()
        for file in files:
            act(file)
        found[name] = {opcode: n for opcode, n in sorted(messages.take().items()) if n > 2}
    return found


def _create(path: Path) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))


def _append(path: Path) -> None:
    with path.open("ab", buffering=0) as file:
        file.write(_LINE)


def _renamed(path: Path) -> Path:
    return path.with_name(f"new-{path.name}")


_OPERATIONS = MappingProxyType[str, Callable[[Path], object]](
    {
        "missing name": lambda path: path.with_name(f"no-{path.name}").exists(),
        "create, close": _create,
        "open, close": lambda path: path.open("rb").close(),
        "open, append, close": _append,
        "open, read, close": Path.read_bytes,
        "stat": os.lstat,
        "chmod": lambda path: path.chmod(0o600),
        "rename": lambda path: path.rename(_renamed(path)),
        "unlink": lambda path: _renamed(path).unlink(),
        "mkdir": Path.mkdir,
        "rmdir": Path.rmdir,
    }
)
