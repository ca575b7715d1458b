"""How long others wait while a file of very many extents is truncated, removed, or closed for the last time.

    python -m bench.waits [--filesystem ext4|xfs] [--extents 150000] [--rounds 3]

For each, natively and through a mount in turn: how long that takes, and the longest of the looks for new names that
another client makes meanwhile; medians of the rounds, in milliseconds. Root; 3 GiB of a file in memory, mostly holes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fusefs.linux.syscalls import fallocate
from tests.support.foreground_mount import trashd_mount
from tests.support.real_filesystems import loop_volume

_PUNCH_HOLE, _KEEP_SIZE = 2, 1
_BLOCK = 4096
_VOLUME_MB = 3000


def _make(path: Path, n_extents: int) -> None:
    fd = os.open(path, os.O_CREAT | os.O_RDWR)
    os.posix_fallocate(fd, 0, n_extents * 2 * _BLOCK)
    for number in range(n_extents):
        fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, number * 2 * _BLOCK, _BLOCK)
    os.fsync(fd)
    os.close(fd)


def _close_last(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    path.unlink()
    os.close(fd)


ACTS: dict[str, Callable[[Path], object]] = {
    "truncate": lambda path: os.truncate(path, 0),
    "unlink": Path.unlink,
    "last close": _close_last,
}


def _measure(top: Path, behind: Path, act: Callable[[Path], object], n_extents: int) -> tuple[float, float]:
    """Seconds that it takes, and of the longest look meanwhile."""
    _make(behind / "large", n_extents)
    (top / "large").lstat()
    begun_s = time.perf_counter()
    worker = threading.Thread(target=act, args=(top / "large",))
    worker.start()
    longest_s, n = 0.0, 0
    while worker.is_alive():
        before_s = time.perf_counter()
        with suppress(FileNotFoundError):
            (top / "beside" / str(n)).lstat()
        longest_s, n = max(longest_s, time.perf_counter() - before_s), n + 1
    took_s = time.perf_counter() - begun_s
    (behind / "large").unlink(missing_ok=True)
    return took_s, longest_s


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--filesystem", choices=["ext4", "xfs"], default="ext4")
    parser.add_argument("--extents", type=int, default=150_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    options = ["-b", str(_BLOCK)] if arguments.filesystem == "ext4" else []
    with loop_volume(arguments.filesystem, _VOLUME_MB, options) as volume:
        source = volume / "source"
        (source / "beside").mkdir(parents=True)
        with trashd_mount(source, limit_s=3600) as mounted:
            for name, act in ACTS.items():
                pairs = [
                    [_measure(top, source, act, arguments.extents) for top in (source, mounted.path)]
                    for _ in range(arguments.rounds)
                ]
                for where, seen in zip(("native", "mounted"), zip(*pairs, strict=True), strict=True):
                    took_s, longest_s = (statistics.median(one) for one in zip(*seen, strict=True))
                    print(f"{name:<10} {where:<8} {took_s * 1e3:8.1f} ms; the longest look {longest_s * 1e3:7.1f} ms")


if __name__ == "__main__":
    _main()
