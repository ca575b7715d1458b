"""Replies that are held back, patched and passed on: their bytes, and what a kernel makes of them."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

from fusefs.core.fast_paths import FastPath
from fusefs.mount.bridge.reply_patching import (
    INIT_BITS,
    NAME_ONLY_GENERATION,
    Patch,
    ReplyPatching,
    beginning,
    cache_listing,
    create_through,
    omit_nodes,
    open_through,
)
from tests.support.foreground_mount import until
from tests.support.fuse_waiting import waiting_mount
from tests.support.open_files import opened, read_entries
from tests.support.real_filesystems import unmount

HEAD = struct.Struct("=IiQ")
OPEN_OUT = struct.Struct("=QIi")
ENTRY_OUT = struct.Struct("=QQQQII88s")
DIRENT = struct.Struct("=QQII")
KEEP_CACHE, CACHE_DIR, STREAM, PASSTHROUGH = 2, 8, 16, 128
ALWAYS = 1 << 6 | 1 << 30 | 1 << 36 | 1 << 38
"""Modes as they were asked for, 64 bits, no file handles."""
KEEP = partial(cache_listing, KEEP_CACHE | CACHE_DIR)
MIB = 1 << 20
LIMIT_S = 30.0
_libc = ctypes.CDLL(None, use_errno=True)


class Wire:
    """A session's fd with a file for a device: what has come to the kernel."""

    def __init__(self) -> None:
        self.session_fd = os.memfd_create("session")
        self.device = os.dup(self.session_fd)
        self.replies = ReplyPatching(self.session_fd)

    def reply(self, *parts: bytes, error: int = 0) -> bytes:
        """What libfuse writes, head and parts; the message."""
        message = HEAD.pack(HEAD.size + sum(map(len, parts)), -error, 7) + b"".join(parts)
        assert os.writev(self.session_fd, [message[: HEAD.size], message[HEAD.size :]]) == len(message)
        return message

    def arrived(self) -> bytes:
        """All of it."""
        return os.pread(self.device, 4 * MIB, 0)


@contextmanager
def a_wire() -> Iterator[Wire]:
    wire = Wire()
    with ExitStack() as stack:
        stack.callback(os.close, wire.session_fd)
        stack.callback(os.close, wire.device)
        stack.callback(wire.replies.close)
        yield wire


def listed(name: bytes, nodeid: int, offset: int, generation: int = NAME_ONLY_GENERATION) -> bytes:
    """One entry of a READDIRPLUS reply; of the name alone, unless it is of another generation."""
    entry = ENTRY_OUT.pack(nodeid, generation, 300, 301, 5, 6, bytes(range(88)))
    dirent = DIRENT.pack(nodeid, offset, len(name), 8) + name
    return entry + dirent.ljust(-(-len(dirent) // 8) * 8, b"\0")


def unlisted(name: bytes, ino: int, offset: int) -> bytes:
    """What arrives of it: no node."""
    return bytes(40) + listed(name, ino, offset)[40:]


def test_a_reply_that_nobody_patches_goes_straight_through() -> None:
    with a_wire() as wire:
        message = wire.reply(b"x" * 16)
        assert wire.arrived() == message
        wire.replies.replied()
        assert wire.arrived() == message


def test_a_reply_arrives_patched_and_the_next_one_untouched() -> None:
    with a_wire() as wire:
        wire.replies.patch_next(KEEP)
        wire.reply(OPEN_OUT.pack(5, STREAM, 9))
        assert wire.arrived() == b""
        wire.replies.replied()
        first = wire.arrived()
        assert OPEN_OUT.unpack_from(first, HEAD.size) == (5, STREAM | KEEP_CACHE | CACHE_DIR, 9)
        second = wire.reply(OPEN_OUT.pack(5, 0, 0))
        assert wire.arrived() == first + second


def init_request(flags: int, more: int) -> bytes:
    """What the kernel sends first."""
    body = struct.pack("=IIIIII40x", 7, 45, 131072, flags, more, 0)
    return struct.pack("=IIQ24x", 40 + len(body), 26, 1) + body


def init_reply(message: bytes) -> tuple[int, int]:
    """The flags, and the depth of the stack of filesystems."""
    flags, more, depth = (struct.unpack_from("=I", message, at)[0] for at in (28, 48, 52))
    return flags | more << 32, depth


def test_the_kernels_offer_is_read_and_left_for_libfuse() -> None:
    request = init_request(1 << 30 | 1 << 18, 1 << 5)
    with a_wire() as wire:
        os.write(wire.session_fd, request)
        os.lseek(wire.session_fd, 0, os.SEEK_SET)
        assert wire.replies.offered() == 1 << 37 | 1 << 30 | 1 << 18
        assert os.read(wire.session_fd, MIB) == request
        wire.replies.patch_next(beginning(frozenset(), stack_depth=1))
        wire.reply(bytes(64))
        wire.replies.replied()
        assert init_reply(wire.arrived()[len(request) :]) == (ALWAYS, 0)
        assert wire.reply(b"x") == wire.arrived()[-17:]


def test_an_old_kernel_offers_what_it_knows() -> None:
    with a_wire() as wire:
        os.write(wire.session_fd, init_request(1 << 18, 0xFFFFFFFF)[:56])
        os.lseek(wire.session_fd, 0, os.SEEK_SET)
        assert wire.replies.offered() == 1 << 18


@pytest.mark.parametrize("path", FastPath)
def test_what_is_wanted_is_asked_for_alone(path: FastPath) -> None:
    with a_wire() as wire:
        wire.replies.patch_next(beginning({path}, stack_depth=2))
        wire.reply(bytes(64))
        wire.replies.replied()
        depth = 2 if path is FastPath.PASSTHROUGH else 0
        assert init_reply(wire.arrived()) == (ALWAYS | INIT_BITS.get(path, 0), depth)


@pytest.mark.parametrize(("through", "before"), [(open_through, b""), (create_through, bytes(range(128)))])
def test_a_file_that_is_passed_through_is_named_and_keeps_no_pages(
    through: Callable[[int], Patch], before: bytes
) -> None:
    with a_wire() as wire:
        wire.replies.patch_next(through(4711))
        message = wire.reply(before, OPEN_OUT.pack(3, KEEP_CACHE | STREAM, 0))
        wire.replies.replied()
        expected = OPEN_OUT.pack(3, PASSTHROUGH | STREAM, 4711)
        assert wire.arrived() == message[: -OPEN_OUT.size] + expected


@pytest.mark.needs("root", "fuse")
def test_a_reply_that_nobody_waits_for_is_told_of() -> None:
    """The kernel knows of no such request."""
    lost: list[str] = []
    session_fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={session_fd},rootmode=40000,user_id=0,group_id=0".encode()
    with tempfile.TemporaryDirectory() as point, ExitStack() as stack:
        stack.callback(os.close, session_fd)
        assert _libc.mount(b"test", os.fsencode(point), b"fuse", ctypes.c_ulong(0), options) == 0
        stack.callback(unmount, Path(point))
        replies = ReplyPatching(session_fd)
        stack.callback(replies.close)
        replies.patch_next(open_through(1), lambda: lost.append("open"))
        os.write(session_fd, HEAD.pack(HEAD.size + OPEN_OUT.size, 0, 7) + OPEN_OUT.pack(3, 0, 0))
        replies.replied()
        assert lost == ["open"]
        replies.patch_next(KEEP)
        os.write(session_fd, HEAD.pack(HEAD.size + OPEN_OUT.size, 0, 7) + OPEN_OUT.pack(3, 0, 0))
        replies.replied()
        assert lost == ["open"]


def test_an_error_is_not_patched() -> None:
    with a_wire() as wire:
        wire.replies.patch_next(KEEP)
        message = wire.reply(error=errno.ENOTDIR)
        wire.replies.replied()
        assert wire.arrived() == message


@pytest.mark.parametrize("name_size", [1, 7, 8, 9, 255])
def test_entries_lose_their_nodes_and_keep_their_names(name_size: int) -> None:
    names = [bytes([65 + number]) * name_size for number in range(3)]
    with a_wire() as wire:
        wire.replies.patch_next(omit_nodes)
        wire.reply(*(listed(name, 100 + at, at) for at, name in enumerate(names)))
        wire.replies.replied()
        assert wire.arrived()[HEAD.size :] == b"".join(unlisted(name, 100 + at, at) for at, name in enumerate(names))


def test_entries_of_which_more_is_known_stay_as_they_are() -> None:
    with a_wire() as wire:
        wire.replies.patch_next(omit_nodes)
        entries = [listed(b"a", 100, 1, 0), listed(b"a name", 101, 2), listed(b"another name", 102, 3, 7)]
        wire.reply(*entries)
        wire.replies.replied()
        assert wire.arrived()[HEAD.size :] == entries[0] + unlisted(b"a name", 101, 2) + entries[2]


def test_the_end_of_a_listing_has_nothing_to_patch() -> None:
    with a_wire() as wire:
        wire.replies.patch_next(omit_nodes)
        message = wire.reply()
        wire.replies.replied()
        assert wire.arrived() == message


def test_a_listing_of_a_megabyte_is_held_back_and_a_short_one_after_it_is_short() -> None:
    one = listed(b"a name of some length", 100, 1)
    n_entries = MIB // len(one)
    with a_wire() as wire:
        for n in (n_entries, 1):
            wire.replies.patch_next(omit_nodes)
            wire.reply(one * n)
            wire.replies.replied()
        whole = unlisted(b"a name of some length", 100, 1)
        assert wire.arrived()[HEAD.size : HEAD.size + n_entries * len(one)] == whole * n_entries
        assert wire.arrived()[HEAD.size + n_entries * len(one) :][HEAD.size :] == whole


def test_nothing_is_held_back_where_nobody_would_pass_it_on() -> None:
    with a_wire() as wire:
        wire.replies.let_pass()
        wire.replies.patch_next(KEEP)
        message = wire.reply(OPEN_OUT.pack(5, 0, 0))
        assert wire.arrived() == message


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="trashd-replies-") as path:
        yield Path(path)


def forget_all(path: Path) -> None:
    """Let the kernel drop the unused nodes of a mount: any reconfiguration does that."""
    subprocess.run(["mount", "-i", "-o", "remount,ro", path], check=True)


@pytest.mark.needs("root", "fuse")
def test_a_kept_listing_is_not_asked_for_again(place: Path) -> None:
    with waiting_mount(place, "--entries", "500", "--keep", limit_s=LIMIT_S) as mount:
        first = os.listdir(place)
        n_readdirs = mount.count("readdirs")
        assert len(first) == 500
        assert os.listdir(place) == first
        assert mount.count("readdirs") == n_readdirs


@pytest.mark.needs("root", "fuse")
def test_without_the_bits_a_listing_is_asked_for_again(place: Path) -> None:
    with waiting_mount(place, "--entries", "500", limit_s=LIMIT_S) as mount:
        first = os.listdir(place)
        n_readdirs = mount.count("readdirs")
        assert os.listdir(place) == first
        assert mount.count("readdirs") == 2 * n_readdirs


@pytest.mark.needs("root", "fuse")
def test_names_alone_give_the_kernel_no_node_and_no_reference(place: Path) -> None:
    with waiting_mount(place, "--entries", "300", "--names-only", limit_s=LIMIT_S) as mount:
        with os.scandir(place) as entries:
            assert {(entry.name, entry.inode(), entry.is_file()) for entry in entries} == {
                (str(number), 1000 + number, True) for number in range(300)
            }
        assert mount.count("lookups") == 0
        assert (place / "7").stat().st_size == 7
        assert mount.count("lookups") == 1
        forget_all(place)
        assert until(lambda: mount.count("forgotten") == 1)


@pytest.mark.needs("root", "fuse")
def test_with_nodes_a_listing_answers_for_the_attributes_too(place: Path) -> None:
    with waiting_mount(place, "--entries", "300", limit_s=LIMIT_S) as mount:
        n_listings = 0

        def answers_for_both() -> bool:
            """Unless the kernel has forgotten it in between."""
            nonlocal n_listings
            n_listings += 1
            n_lookups = mount.count("lookups")
            assert len(os.listdir(place)) == 300
            assert (place / "7").stat().st_size == 7
            return mount.count("lookups") == n_lookups

        assert until(answers_for_both)
        n_told = 300 * n_listings + mount.count("lookups")
        forget_all(place)
        assert until(lambda: mount.count("forgotten") == n_told)


@pytest.mark.needs("root", "fuse")
@pytest.mark.parametrize("words", [("--names-only",), ("--keep", "--names-only")], ids=["names", "kept"])
def test_a_large_listing_comes_in_large_replies(place: Path, words: tuple[str, ...]) -> None:
    n_entries = 20_000
    with waiting_mount(place, "--entries", str(n_entries), *words, limit_s=LIMIT_S) as mount:
        with opened(place, os.O_RDONLY | os.O_DIRECTORY) as fd:  # the kernel asks for as much as there is room for
            names = [name for some in iter(lambda: read_entries(fd, MIB), []) for name, _ in some]
        assert sorted(map(int, names)) == list(range(n_entries))
        assert mount.count("readdirs") < n_entries / 100 or "--keep" in words
