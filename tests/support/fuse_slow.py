"""A real filesystem as slow as a network's: FUSE in C, passing everything through, many requests at a time.

    with tmpfs_volume() as source, slow_volume(source) as slow:
        os.stat(slow.path / "x")        # 1 ms a component: a lookup each, and a getattr when its second is over
        slow.hang("x")                  # now for ever

Its parts are slowfs*.c beside this file, compiled once and kept by their content's hash.
"""

import contextlib
import enum
import fcntl
import hashlib
import mmap
import os
import select
import shlex
import socket
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.support.foreground_mount import forget_all
from tests.support.fuse_watchdog import FuseMount, fuse_mount
from tests.support.third_party_suites import cache

_FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread")
_COMPILE_LIMIT_S = 60
_HANG_LIMIT_S = 20.0
# struct control in slowfs.h.
_SIZE_BYTES = 4096
_DELAY_US, _DELAYS_ALL, _XATTRS, _N_UNDER_WAY, _MAX_UNDER_WAY, _HANGS, _NAME = 0, 16, 20, 24, 28, 32, 36
_NAME_SIZE = 260
_REFUSAL = _NAME + _NAME_SIZE
_REFUSED_NAME = _REFUSAL + 4
_COUNTERS = _REFUSED_NAME + _NAME_SIZE
_COUNTER = struct.Struct("=24sQ")


class Xattrs(enum.IntFlag):
    """Who has extended attributes.

    FILES, DIRECTORIES  without: EOPNOTSUPP, as on many network filesystems
    UNKNOWN             ENOSYS, as of a server that has never heard of them
    FOR_ROOT            others are told that there are none; it is the server who checks permissions then
    """

    FILES, DIRECTORIES, UNKNOWN, FOR_ROOT = 1, 2, 4, 8
    NONE, ALL = 0, FILES | DIRECTORIES


def slowfs() -> Path:
    """The program, compiled if it is not there yet.

    Raises  CalledProcessError: gcc could not; its words are on stderr
    """
    sources = sorted(Path(__file__).parent.glob("slowfs*.[ch]"))
    digest = hashlib.sha256(b"\0".join([repr(_FLAGS).encode(), *(source.read_bytes() for source in sources)]))
    program = cache() / f"slowfs-{digest.hexdigest()[:16]}"
    program.parent.mkdir(parents=True, exist_ok=True)
    with program.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two sessions at a time compile once
        if not program.exists():
            asked = ["pkg-config", "--cflags", "--libs", "fuse3"]
            fuse3 = shlex.split(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)
            new = program.with_suffix(".new")
            code = [source for source in sources if source.suffix == ".c"]
            subprocess.run(["gcc", *_FLAGS, "-o", new, *code, *fuse3], check=True, timeout=_COMPILE_LIMIT_S)
            new.rename(program)
    return program


class SlowVolume:
    """A directory as the slow filesystem shows it, and the controls of that, which act at once."""

    def __init__(self, fuse: FuseMount, backing: Path, control: mmap.mmap, hung: socket.socket) -> None:
        self.path = fuse.path
        self.backing = backing
        self.fuse = fuse
        self._control = control
        self._hung = hung

    def delay(self, us: int) -> None:
        """Let each lookup and getattr take so long."""
        struct.pack_into("=Q", self._control, _DELAY_US, us)

    def delay_all(self, *, is_all: bool = True) -> None:
        """Let every operation take so long, not only lookup and getattr."""
        struct.pack_into("=I", self._control, _DELAYS_ALL, is_all)

    def serve_xattrs(self, xattrs: Xattrs) -> None:
        """Have others from now on; who checks permissions stays as it was."""
        struct.pack_into("=I", self._control, _XATTRS, xattrs)

    def forget_all(self) -> None:
        """Let the kernel forget every unused name and node of it."""
        forget_all(self.path)

    def hang(self, name: str) -> None:
        """Let operations wait, from now on, that are about a name with this in it, or about an inode of such a name."""
        encoded = os.fsencode(name)
        if not 0 < len(encoded) < _NAME_SIZE:
            raise ValueError(name)
        self.go_on()
        while select.select([self._hung], [], [], 0)[0]:  # what hung for an earlier test
            self._hung.recv(_SIZE_BYTES)
        self._control[_NAME:_REFUSAL] = encoded.ljust(_NAME_SIZE, b"\0")
        struct.pack_into("=I", self._control, _HANGS, 1)

    def go_on(self) -> None:
        """Let everything go on that hangs."""
        struct.pack_into("=I", self._control, _HANGS, 0)

    def refuse(self, number: int, name: str = "") -> None:
        """Answer an errno from now on to all, or to what is about a name with this in it; 0: to nothing any more."""
        encoded = os.fsencode(name)
        if len(encoded) >= _NAME_SIZE:
            raise ValueError(name)
        struct.pack_into("=I", self._control, _REFUSAL, 0)
        self._control[_REFUSED_NAME:_COUNTERS] = encoded.ljust(_NAME_SIZE, b"\0")
        struct.pack_into("=I", self._control, _REFUSAL, number)

    def wait_until_hung(self, n: int = 1) -> None:
        """Wait for the next n requests that begin to hang.

        Raises    TimeoutError: they don't come
        """
        for _ in range(n):
            self._hung.recv(1)

    @property
    def n_messages(self) -> dict[str, int]:
        """What the kernel has asked so far, by operation: lookup, getattr, readdir and so on; no zeros."""
        found = {}
        for at in range(_COUNTERS, _SIZE_BYTES - _COUNTER.size + 1, _COUNTER.size):
            name, n = _COUNTER.unpack_from(self._control, at)
            if n:
                found[name.rstrip(b"\0").decode()] = n
        return found

    @property
    def n_under_way(self) -> int:
        """Requests that are not answered yet."""
        return int(struct.unpack_from("=I", self._control, _N_UNDER_WAY)[0])

    @property
    def max_under_way(self) -> int:
        """The most that there were at a time, since the mount or since forget_max."""
        return int(struct.unpack_from("=I", self._control, _MAX_UNDER_WAY)[0])

    def forget_max(self) -> None:
        """Let max_under_way begin anew."""
        struct.pack_into("=I", self._control, _MAX_UNDER_WAY, 0)


@contextlib.contextmanager
def slow_volume(
    source: Path,
    delay_us: int = 1000,
    ttl_s: float = 1.0,
    *,
    xattrs: Xattrs = Xattrs.ALL,
    limit_s: float = 60,
    n_threads: int | None = None,
) -> Iterator[SlowVolume]:
    """A directory seen through the slow filesystem, open to all users.

    delay_us    before each lookup and getattr: a round trip
    ttl_s       how long the kernel believes names and attributes; it remembers no absent names
    n_threads   requests that it works on at a time; None: as many as come
    Raises      TimeoutError: it hung for limit_s, see fuse_mount; what hangs at the end is let go
    """
    with contextlib.ExitStack() as stack:
        shared = os.memfd_create("slowfs")
        stack.callback(os.close, shared)
        os.ftruncate(shared, _SIZE_BYTES)
        control = stack.enter_context(mmap.mmap(shared, _SIZE_BYTES))
        struct.pack_into("=QQII", control, _DELAY_US, delay_us, round(ttl_s * 1e6), 0, xattrs)
        hung, theirs = stack.enter_context(_socketpair())
        hung.settimeout(_HANG_LIMIT_S)
        point = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="trashd-slow-")))
        point.chmod(0o755)
        argv: list[str | Path] = [slowfs(), source, point, f"/proc/self/fd/{shared}"]
        argv += [] if n_threads is None else [str(n_threads)]
        fuse = stack.enter_context(fuse_mount(argv, point, limit_s, stdio=theirs.fileno(), pass_fds=[shared]))
        slow = SlowVolume(fuse, source, control, hung)
        stack.callback(slow.go_on)
        stack.callback(slow.refuse, 0)
        yield slow


@contextlib.contextmanager
def _socketpair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs
