"""What commands cost in system calls, and a mount's operations in messages: the same on a busy machine and an idle one.

Of swap, rm and restore it is all calls that trashd makes, by its own hook before each; of a file that is reaped or
swept, and of what is only done a thousand files long, those of the whole command in one size less those in another.
"""

import os
import re
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from bench.messages import Messages
from bench.support import TRASHD, make_flat
from fusefs.linux.kernel import Kernel
from tests.support.foreground_mount import forget_all, until
from tests.support.store_verbs import calls_of, remove, restore, swap

N_FEW, N_MORE = 2000, 4000
"""Files; both are more than one buffer of names."""
N_NAMES = 20
_LINE = b"x" * 128
_LOOKED, _CHANGED = "looked", "changed"
_SETTLED_S = 2.5

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
_RARE = 0.5
"""What comes less often for a file is the interpreter's, the allocator's, or for each slice of the time."""
_WAITS = ("futex", "poll", "ppoll", "epoll_wait", "sched_yield")
"""How many there are depends on who waits for whom, and on how long a slice takes."""


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


def prepare(source: Path) -> None:
    """Make what is looked at through a mount, and where things change, before it is mounted."""
    source.mkdir()
    (source / _CHANGED).mkdir()
    make_flat(source / _LOOKED, N_NAMES)


def of_operations(mount: Path, messages: Messages) -> dict[str, Counts]:
    """The messages of each operation, none of whose names the kernel knows; what does not come for each is left out.

    What it knows would depend on the time: it believes for longer what has not changed for a second.
    """
    found = {name: _of_each(act, mount, _CHANGED, messages) for name, act in _CHANGES.items()}
    changed_s = (mount / _LOOKED).stat().st_ctime
    assert until(lambda: time.time() - changed_s > _SETTLED_S)
    return found | {name: _of_each(act, mount, _LOOKED, messages) for name, act in _LOOKS.items()}


def _of_each(act: Callable[[Path], object], mount: Path, directory: str, messages: Messages) -> Counts:
    files = [mount / directory / f"f{number}" for number in range(N_NAMES)]
    forget_all(mount)
    (mount / directory).stat()
    messages.take()
    for file in files:
        act(file)
    each = {opcode: round(n / N_NAMES) for opcode, n in sorted(messages.take().items())}
    return {opcode: n for opcode, n in each.items() if n}


def _create(path: Path) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))


def _open(path: Path) -> None:
    os.close(os.open(path, os.O_RDONLY))


def _append(path: Path) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.write(fd, _LINE)
    os.close(fd)


def _read(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.read(fd, len(_LINE))
    os.close(fd)


def _named(path: Path, word: str) -> Path:
    return path.with_name(f"{word}-{path.name}")


_CHANGES = MappingProxyType[str, Callable[[Path], object]](
    {
        "create, close": _create,
        "rename": lambda path: path.rename(_named(path, "new")),
        "unlink": lambda path: _named(path, "new").unlink(),
        "mkdir": Path.mkdir,
        "rmdir": Path.rmdir,
    }
)
_LOOKS = MappingProxyType[str, Callable[[Path], object]](
    {
        "missing name": lambda path: os.access(_named(path, "no"), os.F_OK),
        "stat": os.lstat,
        "open, close": _open,
        "open, append, close": _append,
        "open, read, close": _read,
        "chmod": lambda path: path.chmod(0o600),
    }
)
