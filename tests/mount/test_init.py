"""INIT: what the kernel offers is read, what a mount has is asked for, and nothing else."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator

import pytest

from fusefs.core.errors import KernelRefused
from fusefs.mount.life.init import InitFlag, answer_init, read_init, why_too_old

OFFERED = 0x7FD_73FFFFFB
"""Linux 6.18's flags."""
ALWAYS = 0x40_5044B069
ACLS = 1 << 20
UNIQUE = 2


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The kernel's and the daemon's of what stands for /dev/fuse."""
    kernel, daemon = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with kernel, daemon:
        yield kernel, daemon


def request(flags: int, *, version: tuple[int, int] = (7, 45), opcode: int = 26, n_bytes: int = 64) -> bytes:
    body = struct.pack("=IIIIII40x", *version, 131072, flags & 0xFFFFFFFF, flags >> 32, 0)[:n_bytes]
    return struct.pack("=IIQ24x", 40 + len(body), opcode, UNIQUE) + body


def answered(ends: tuple[socket.socket, socket.socket], wanted: InitFlag, *, has_acls: bool) -> tuple[int, ...]:
    """The fields of the reply: flags, the number of background requests, bytes and pages of a write, and the depth."""
    kernel, daemon = ends
    kernel.send(request(OFFERED))
    answer_init(daemon.fileno(), read_init(daemon.fileno()), wanted, has_acls=has_acls, stack_depth=2)
    reply = kernel.recv(1000)
    assert struct.unpack_from("=IiQ", reply) == (len(reply), 0, UNIQUE)
    major, minor, ahead, flags, background, congested, write, gran, pages, _, more, depth = struct.unpack(
        "=IIIIHHIIHHII24x", reply[16:]
    )
    assert (major, minor, ahead, gran) == (7, 33, 131072, 1)
    assert congested < background
    return flags | more << 32, background, write, pages, depth


@pytest.mark.parametrize("flag", [InitFlag(0), *InitFlag])
def test_what_a_mount_has_is_asked_for_alone(ends: tuple[socket.socket, socket.socket], flag: InitFlag) -> None:
    depth = 2 if flag is InitFlag.PASSTHROUGH else 0
    assert answered(ends, flag, has_acls=False) == (ALWAYS | flag, 256, 1 << 20, 256, depth)


def test_permissions_are_checked_by_acls_only_where_the_kernel_checks_them(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    assert answered(ends, InitFlag(0), has_acls=True)[0] == ALWAYS | ACLS


def test_what_a_kernel_does_not_offer_is_found(ends: tuple[socket.socket, socket.socket]) -> None:
    kernel, daemon = ends
    lacking = InitFlag.PASSTHROUGH | InitFlag.OVER_IO_URING
    kernel.send(request(OFFERED & ~lacking))
    init = read_init(daemon.fileno())
    assert [flag for flag in InitFlag if not init.offers(flag)] == list(lacking)


def test_an_older_kernel_offers_what_it_knows(ends: tuple[socket.socket, socket.socket]) -> None:
    """Before Linux 5.17 the request ends after 32 flags."""
    kernel, daemon = ends
    kernel.send(request(InitFlag.CACHE_SYMLINKS, version=(7, 33), n_bytes=16))
    init = read_init(daemon.fileno())
    assert [flag for flag in InitFlag if init.offers(flag)] == [InitFlag.CACHE_SYMLINKS]


@pytest.mark.parametrize(("version", "opcode"), [((7, 32), 26), ((6, 45), 26), ((7, 45), 1)])
def test_what_is_too_old_or_no_init_is_refused(
    ends: tuple[socket.socket, socket.socket], version: tuple[int, int], opcode: int
) -> None:
    kernel, daemon = ends
    kernel.send(request(OFFERED, version=version, opcode=opcode))
    with pytest.raises(KernelRefused, match=r"FUSE 7\.33 is needed"):
        read_init(daemon.fileno())


@pytest.mark.parametrize(("release", "is_old"), [("4.18.0-553.el8", True), ("5.10.0", True), ("5.11.0", False)])
def test_a_kernel_that_is_too_old_is_known_before_the_mount(release: str, *, is_old: bool) -> None:
    assert (why_too_old(release) is not None) is is_old


def test_this_kernel_will_do() -> None:
    assert why_too_old(os.uname().release) is None
