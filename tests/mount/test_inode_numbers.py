"""Inode numbers are the backing ones, and a node is one incarnation of an inode, even if its number is reused (I9)."""

import errno
import mmap
import os
import shutil
import struct
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest

from fusefs.core.metadata_cache import ROOT
from fusefs.linux.fd import Fd
from fusefs.linux.syscalls import AT_FDCWD, RENAME_EXCHANGE, name_to_handle_at, renameat2
from tests.support.background_processes import finish, workers
from tests.support.fake_dev_fuse import Names, Somebody, vfs_at
from tests.support.foreground_mount import trashd_mount, until
from tests.support.make_trees import Spec, make_tree
from tests.support.mount_and_backing import CLIENTS_ON, directory_for, tops_for_clients
from tests.support.open_files import opened
from tests.support.oracle import Oracle
from tests.support.real_filesystems import gives_numbers_again, loop_volume, sync

pytestmark = pytest.mark.needs("root", "fuse", "loop")


OLD, NEW = b"A" * 10_000, b"B of another size"
N_TRIES = 200


def numbers(top: Path) -> dict[str, int]:
    """Inode numbers of a tree, by path."""
    return {str(path.relative_to(top)): path.lstat().st_ino for path in (top, *top.rglob("*"))}


TREE: Spec = {"a": {"b": {"c": "1", "d": {}}}, "e": "2", "f": {"g": {}}}


def test_numbers_are_the_backing_ones_over_forget_and_remount() -> None:
    with loop_volume("ext4") as volume:
        source = make_tree(volume / "source", TREE)
        there = numbers(source)
        for _ in range(2):
            with trashd_mount(source) as mounted:
                assert numbers(mounted.path) == there
                mounted.forget_all()
                assert numbers(mounted.path) == there


def test_links_are_one_file_over_forget(oracle: Oracle) -> None:
    s = oracle.mounted
    s.put(b"a", b"one")
    s.mkdir(b"d")
    s.link(b"a", b"d/b")
    for _ in range(2):
        assert s.ino(b"a") == s.ino(b"d/b")
        assert s.stat(b"a").n_links == 2
        oracle.mount.forget_all()
    with opened(s.top + b"/a", os.O_WRONLY) as fd:
        os.pwrite(fd, b"two", 0)
    assert s.get(b"d/b") == b"two"


def made_with_number(make: Callable[[bytes], None], look: Callable[[bytes], int], wanted: int) -> bytes | None:
    """Make files until one has an inode number; its name, or None where the filesystem won't (tmpfs)."""
    for i in range(N_TRIES):
        name = b"new%d" % i
        make(name)
        if look(name) == wanted:
            return name
    return None


@contextmanager
def suppress_stale() -> Iterator[None]:
    """Of what was removed behind the mount, while it was not open, nothing is known any more."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise


def test_new_file_with_the_number_of_a_reaped_one_is_itself(oracle: Oracle, volume: Path) -> None:
    """The law of I9: A written through the mount, its directory swapped and reaped, B made with A's number."""
    s, behind = oracle.mounted, oracle.behind["mount"]
    s.mkdir(b"victim")
    s.put(b"victim/A", OLD)
    assert s.get(b"victim/A") == OLD  # in the page cache now
    old = behind.ino(b"victim/A")
    with opened(s.top + b"/victim/A", os.O_PATH) as holder:  # keeps the node, and no blocks
        s.mkdir(b"fresh")
        s.rename(b"fresh", b"victim", RENAME_EXCHANGE)
        shutil.rmtree(behind.top + b"/fresh")  # as the reaper does, on the backing path
        name = made_with_number(lambda n: s.put(b"victim/" + n, NEW), lambda n: behind.ino(b"victim/" + n), old)
        if name is None:
            assert not gives_numbers_again(volume)
            return
        new = b"victim/" + name
        assert s.get(new) == NEW
        assert s.stat(new) == behind.stat(new)
        with suppress_stale():
            assert os.stat(holder).st_ino != s.ino(new)
        with pytest.raises(OSError, match=r"Stale|No such"):
            os.open(f"/proc/self/fd/{holder}", os.O_RDONLY)
        s.put(new, b"again")
        assert behind.get(new) == b"again"

    def has_its_number() -> bool:
        oracle.mount.forget_all()
        assert s.get(new) == b"again"
        return s.ino(new) == old

    assert until(has_its_number)  # the kernel may ask for the new one before it tells that the old one is forgotten


def test_new_file_with_the_number_of_an_unlinked_one_is_itself(oracle: Oracle, volume: Path) -> None:
    """The law of I9 with unlink through the mount: a process that holds the old name's node is told of the old one."""
    s, behind = oracle.mounted, oracle.behind["mount"]
    s.put(b"A", OLD, 0o600)
    s.get(b"A")
    old = behind.ino(b"A")
    with opened(s.top + b"/A", os.O_PATH) as holder:
        s.unlink(b"A")
        name = made_with_number(lambda n: s.put(n, NEW), behind.ino, old)
        stat_before = os.stat(holder)
        assert (stat_before.st_nlink, stat_before.st_size, stat_before.st_mode & 0o777) == (0, len(OLD), 0o600)
        if name is None:
            assert not gives_numbers_again(volume)
            return
        assert s.get(name) == NEW
        assert s.stat(name) == behind.stat(name)
        assert s.ino(name) != stat_before.st_ino


def test_new_directory_with_the_number_of_an_old_one_is_empty(oracle: Oracle) -> None:
    s, behind = oracle.mounted, oracle.behind["mount"]
    s.mkdir(b"d")
    s.put(b"d/file", OLD)
    old = behind.ino(b"d")
    with opened(s.top + b"/d", os.O_PATH) as holder:
        s.unlink(b"d/file")
        s.rmdir(b"d")
        name = made_with_number(s.mkdir, behind.ino, old)
        if name is not None:
            assert s.listdir(name) == []
            s.put(name + b"/file", NEW)
            assert s.get(name + b"/file") == NEW
        assert os.stat(holder).st_nlink == 0
        with pytest.raises(FileNotFoundError):
            os.stat("file", dir_fd=holder)


def free_blocks(top: bytes) -> int:
    sync(Path(os.fsdecode(top)))
    return os.statvfs(top).f_bfree


@pytest.mark.parametrize("how", ["unlinked", "replaced", "reaped"])
def test_deleted_file_gives_its_blocks_back_while_the_kernel_knows_it(oracle: Oracle, how: str) -> None:
    """Pitfall 10: no fd of the daemon's holds what is not open."""
    s, behind = oracle.mounted, oracle.behind["mount"]
    s.mkdir(b"d")
    s.mkdir(b"fresh")
    before = free_blocks(behind.top)
    s.put(b"d/file", bytes(4 << 20))
    s.get(b"d/file")
    assert before - free_blocks(behind.top) >= 500
    with opened(s.top + b"/d/file", os.O_PATH):
        match how:
            case "unlinked":
                s.unlink(b"d/file")
            case "replaced":
                s.put(b"new")
                s.rename(b"new", b"d/file")
            case _:
                s.rename(b"fresh", b"d", RENAME_EXCHANGE)
                shutil.rmtree(behind.top + b"/fresh")
        assert until(lambda: before - free_blocks(behind.top) < 50)  # the handle's release comes by itself


def test_directory_moved_behind_the_mount_is_reached_by_who_knows_it(oracle: Oracle) -> None:
    """The store moves what it adopts on the backing path: holders of the old tree keep it."""
    s, behind = oracle.mounted, oracle.behind["mount"]
    s.mkdir(b"d")
    s.mkdir(b"d/sub")
    s.put(b"d/sub/file", b"old")
    with opened(s.top + b"/d/sub", os.O_RDONLY | os.O_DIRECTORY) as holder:
        os.mkdir(behind.top + b"/store")
        behind.rename(b"d", b"store/d")
        oracle.mount.forget_all()
        assert os.listdir(holder) == ["file"]
        with os.fdopen(os.open("file", os.O_RDONLY, dir_fd=holder), "rb") as file:
            assert file.read() == b"old"
        os.close(os.open("made", os.O_CREAT | os.O_WRONLY, dir_fd=holder))
        assert behind.listdir(b"store/d/sub") == [b"file", b"made"]


@pytest.mark.takes_engine
def test_no_file_has_a_handle_that_would_be_the_next_ones(oracle: Oracle) -> None:
    """The kernel would make it of the nodeid: a process that kept one (an NFS server does) got another file by it."""
    s = oracle.mounted
    s.put(b"file")
    s.mkdir(b"d")
    for path in (b"", b"/file", b"/d"):
        with opened(s.top + path, os.O_RDONLY) as fd:
            assert not name_to_handle_at(fd)


N_MADE = int(os.environ.get("TRASHD_TEST_INCARNATIONS", "200"))
LIMIT_S = max(100.0, N_MADE / 10)
N_LOOKS = 20_000
N_NAMES, N_HELD = 5, 8
N_WORDS = 1500
"""At most: three pages."""
WORD = struct.Struct("=IIQ")
"""The client that made it, its number there, and how many words it has."""


class Held(NamedTuple):
    """A file that is open, mapped, and perhaps gone."""

    fd: int
    mapped: mmap.mmap
    content: bytes

    def check(self) -> None:
        """Raises  OSError ERANGE: it is another"""
        size = os.fstat(self.fd).st_size
        if not self.content == os.pread(self.fd, size + 1, 0) == self.mapped[:]:
            raise OSError(errno.ERANGE, os.strerror(errno.ERANGE))

    def close(self) -> None:
        self.check()
        self.mapped.close()
        os.close(self.fd)


def held(path: Path) -> Held:
    """Raises  OSError: ERANGE: what is read is not one file, whole; ENOENT"""
    fd = os.open(path, os.O_RDONLY)
    size = os.fstat(fd).st_size
    mapped = mmap.mmap(fd, size, prot=mmap.PROT_READ)
    content = os.pread(fd, size + 1, 0)
    _who, _number, n_words = WORD.unpack_from(content)
    if content != content[: WORD.size] * n_words:
        raise OSError(errno.ERANGE, os.strerror(errno.ERANGE))
    return Held(fd, mapped, content)


def work(gives_again: bool, who: int, top: Path) -> None:
    """gives_again: the filesystem gives a free inode number to the next file

    Raises  OSError: ERANGE: see Held; any that a plain directory does not give
    """
    random, mine, numbers = Random(who), top / f"made-{who}", set()
    held_now: deque[Held] = deque()
    for number in range(N_MADE):
        path = top / f"name{random.randrange(N_NAMES)}"
        n_words = random.randrange(1, N_WORDS)
        mine.write_bytes(WORD.pack(who, number, n_words) * n_words)
        numbers.add(mine.stat().st_ino)
        mine.rename(path)
        try:
            held_now.append(held(top / f"name{random.randrange(N_NAMES)}"))
            random.choice(held_now).check()
            if random.random() < 0.5:
                path.unlink()
        except FileNotFoundError:
            continue
        finally:
            if len(held_now) > N_HELD:
                held_now.popleft().close()
    for one in held_now:
        one.close()
    if gives_again and len(numbers) > N_MADE / 2:
        raise OSError(errno.E2BIG, "numbers are not given again")


def test_what_is_seen_of_a_name_is_all_of_one_file(volume: Path) -> None:
    """Two are exchanged behind the mount: the attributes of one and the handle of the other never belong together."""
    right = {}
    for size, name in enumerate(("one", "two")):
        (volume / name).write_bytes(bytes(size))
        right[size] = name_to_handle_at(AT_FDCWD, os.fsencode(volume / name))

    def exchange() -> None:
        with Fd(os.open(volume, os.O_PATH)) as top:
            while True:
                renameat2(top, b"one", top, b"two", RENAME_EXCHANGE)

    with vfs_at(volume, max_fds=0, is_shared=True) as vfs, workers([exchange]):
        for _ in range(N_LOOKS):
            found = Names(vfs).lookup(ROOT, b"one", Somebody(0, 0, os.getpid(), 0o022))
            node = vfs.nodes.get(found.nodeid)
            assert node is not None
            assert right[found.attributes.size] == node.source[1]


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("where", [where for where in CLIENTS_ON if "slow, by" not in where])
def test_nobody_reads_another_file_than_the_one_he_opened(volume: Path, where: str) -> None:
    gives_again = gives_numbers_again(volume)
    with tops_for_clients(directory_for(volume, where), where, LIMIT_S) as tops:
        finish([partial(work, gives_again, *one) for one in enumerate(tops)])
