"""The system calls of swap and rm: the same whatever the size of the tree and of the store. How many: bench/stored."""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fusefs.linux.kernel import Kernel
from tests.support.real_filesystems import tmpfs_volume
from tests.support.store_verbs import calls_of, init, recover_all, remove, swap
from tests.support.trashd_command import TRASHD, environment

pytestmark = pytest.mark.needs("root")

N_FSYNCS = 2
"""Of the record before the exchange, of the container after the adoption (docs/crash.md)."""

MEMORY = frozenset({"brk", "mmap", "munmap", "mremap", "mprotect", "madvise"})

VERBS: dict[str, Callable[[Path, Kernel], object]] = {"swap": swap, "rm": remove}
PRIVATE = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
"""Root asks /proc for other mount namespaces: what else runs on the machine must not count."""


def flat(path: Path, n_files: int) -> Path:
    path.mkdir()
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    for number in range(n_files):
        os.mknod(b"%d" % number, 0o600, dir_fd=fd)
    os.close(fd)
    return path


@pytest.mark.parametrize("verb", VERBS)
def test_calls_are_the_same_in_an_empty_store_and_beside_a_hundred_orphans(volume: Path, verb: str) -> None:
    first, last = flat(volume / "first", 1), flat(volume / "last", 1)
    in_empty_store = calls_of(lambda kernel: VERBS[verb](first, kernel))
    for number in range(100):
        (volume / f".trashd/u/0/drop/{number}").touch()
    assert recover_all(volume) == []
    assert calls_of(lambda kernel: VERBS[verb](last, kernel)) == in_empty_store


@pytest.fixture(scope="module")
def _roomy() -> Iterator[Path]:
    with tmpfs_volume("256m", ("nr_inodes=0",)) as path:
        yield path


@pytest.fixture
def roomy(_roomy: Path) -> Path:
    """A tmpfs with a store that root knows, and with room for a hundred thousand inodes."""
    init(_roomy)
    return _roomy


def traced(verb: str, victim: Path, log: Path) -> Counter[str]:
    """The system calls of the real command, its interpreter's included, by name; but for those for memory.

    How many of these an allocator makes depends on where the kernel happens to put its first page.
    """
    strace = ("strace", "-f", "-qq", "--signal=none", "--output", str(log))
    variables = environment({"PYTHONHASHSEED": "0"})
    subprocess.run([*PRIVATE, *strace, TRASHD, verb, victim], env=variables, capture_output=True, check=True)
    calls = re.findall(r"^\d+ +(\w+)\(", log.read_text(errors="replace"), re.MULTILINE)
    return Counter(call for call in calls if call not in MEMORY)


@pytest.mark.needs("strace")
@pytest.mark.parametrize("verb", VERBS)
def test_real_command_makes_the_same_calls_for_ten_files_and_a_hundred_thousand(
    roomy: Path, tmp_path: Path, verb: str
) -> None:
    victims = [flat(roomy / f"{verb}{number}", n_files) for number, n_files in enumerate((0, 10, 100_000))]
    # The first run may have to compile what the others find compiled.
    _, few, many = [traced(verb, victim, tmp_path / victim.name) for victim in victims]
    assert few["renameat2"] + few["renameat"] + few["rename"] == 2  # the right process was looked at
    assert many == few


@pytest.mark.needs("strace")
@pytest.mark.parametrize("verb", VERBS)
def test_real_command_flushes_no_more_than_the_record_and_the_container(roomy: Path, tmp_path: Path, verb: str) -> None:
    calls = traced(verb, flat(roomy / f"flush-{verb}", 10), tmp_path / "log")
    flushes = {call: calls[call] for call in ("fsync", "fdatasync", "sync", "syncfs", "sync_file_range", "msync")}
    assert 0 < flushes["fsync"] <= N_FSYNCS
    assert sum(flushes.values()) == flushes["fsync"]
