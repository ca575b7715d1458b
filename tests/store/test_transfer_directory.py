"""Transfer directories are removed, or waited for only so long; a directory of a deep tree is opened with few fds."""

import errno
import os
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from fusefs.core.names import Name
from fusefs.linux.kernel import Kernel
from fusefs.store import transfer_directory as transfer_module
from fusefs.store.backing_and_mount import BackingAndMount
from fusefs.store.layout import TRANSFER_PREFIX
from fusefs.store.transfer_directory import empty_into
from fusefs.store.walk import DeepOpener, DeepOpeners
from tests.support.make_trees import CountedPathBytes, deep_chain, make_tree, remove_tree_hard

TRANSFER, INNER, INMOST = ((TRANSFER_PREFIX + name).decode() for name in (b"0", b"1", b"2"))
N_TRIES = 5


def _empty(kernel: Kernel, container: Path) -> None:
    with ExitStack() as opened:
        fds = [opened.enter_context(kernel.open_path(os.fsencode(path))) for path in (container / TRANSFER, container)]
        empty_into(kernel, fds[0], fds[1], Name(TRANSFER.encode()), fds[1])


def test_contents_of_nested_transfer_directories_move_to_the_container(tmp_path: Path) -> None:
    make_tree(tmp_path / TRANSFER, {INNER: {INMOST: {"tree": {"file": "1"}}}, "fresh": {"x": "2"}})
    _empty(Kernel(), tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["fresh", "tree"]
    assert (tmp_path / "tree/file").read_text() == "1"


def test_nested_transfer_directories_are_waited_for_as_long_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_module, "_N_TRIES", N_TRIES)
    make_tree(tmp_path / TRANSFER, {INNER: {INMOST: {"tree": {"file": "1"}}}})
    n_asked = 0

    def refuse(call: str) -> None:
        nonlocal n_asked
        if call == "renameat2":
            n_asked += 1
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    with pytest.raises(OSError, match="busy"):
        _empty(Kernel(refuse), tmp_path)
    assert n_asked == N_TRIES
    assert (tmp_path / TRANSFER / INNER / INMOST / "tree/file").read_text() == "1"


NAME = b"n" * 30
N_LEVELS = 400


def at(level: int) -> bytes:
    return b"/".join([NAME] * level)


@pytest.fixture
def chain(tmp_path: Path) -> Iterator[Path]:
    yield deep_chain(tmp_path / "top", N_LEVELS, NAME)
    remove_tree_hard(tmp_path / "top")


@pytest.fixture
def root(chain: Path) -> Iterator[BackingAndMount]:
    with Kernel().open_path(bytes(chain)) as fd:
        yield BackingAndMount(fd)


def inode(kernel: Kernel, opener: DeepOpener, path: bytes) -> int:
    with opener.beneath(path) as sides:
        return kernel.fstat(sides.fd).st_ino


def test_each_path_leads_to_its_directory_in_whatever_order(root: BackingAndMount) -> None:
    kernel, levels = Kernel(), [random.randrange(N_LEVELS + 1) for _ in range(200)]
    with DeepOpener(kernel, root) as opener:
        for level in levels:
            with kernel.open_beneath(root.fd, at(level) or b".") as fd:
                assert inode(kernel, opener, at(level)) == kernel.fstat(fd).st_ino


@pytest.mark.parametrize("step", [1, -1], ids=["down", "up"])
def test_way_along_a_chain_is_as_long_as_the_chain(root: BackingAndMount, step: int) -> None:
    def length(n_levels: int) -> int:
        kernel = CountedPathBytes()
        with DeepOpener(kernel, root) as opener:
            for level in range(n_levels + 1)[::step]:
                opener.beneath(at(level)).__exit__()
        return kernel.n_bytes

    assert length(N_LEVELS) < 3 * length(N_LEVELS // 2)


def test_few_fds_are_open_however_deep_it_is(tmp_path: Path) -> None:
    chain = deep_chain(tmp_path / "deeper", 3000, NAME)
    n_before = len(os.listdir("/proc/self/fd"))
    with Kernel().open_path(bytes(chain)) as fd, DeepOpeners(Kernel()) as ways:
        ways.opener_of(BackingAndMount(fd)).beneath(at(3000)).__exit__()
        n_open = len(os.listdir("/proc/self/fd")) - n_before
    assert n_open < 40
    assert len(os.listdir("/proc/self/fd")) == n_before
    remove_tree_hard(chain)


def test_what_was_moved_is_noticed_before_long(tmp_path: Path, chain: Path, root: BackingAndMount) -> None:
    path = at(N_LEVELS)

    def open_often() -> None:
        for _ in path:
            opener.beneath(path).__exit__()

    with DeepOpener(Kernel(), root) as opener:
        opener.beneath(path).__exit__()
        os.rename(chain / os.fsdecode(NAME), tmp_path / "elsewhere")
        with pytest.raises(FileNotFoundError):
            open_often()
    remove_tree_hard(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("path", "number"),
    [(b"link/" + at(99), errno.ELOOP), (at(100) + b"/link", errno.ENOTDIR), (at(100) + b"/.." * 400, errno.EXDEV)],
)
def test_neither_links_nor_what_is_above_lie_beneath(
    chain: Path, root: BackingAndMount, path: bytes, number: int
) -> None:
    (chain / "link").symlink_to(os.fsdecode(NAME))
    with Kernel().open_beneath(root.fd, at(100)) as deep:
        os.symlink(".", "link", dir_fd=deep)
    with DeepOpener(Kernel(), root) as opener, pytest.raises(OSError, match=os.strerror(number)):
        opener.beneath(path)
