"""What the kernel asks a FUSE daemon, counted by opcode as it sends it.

FORGET and INTERRUPT are not among it: no client waits for them.

Source  the tracepoint fuse:fuse_request_send; Documentation/trace/ftrace.rst, "Instances"
"""

import contextlib
import errno
import os
import re
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

_TRACING = Path("/sys/kernel/tracing")
_EVENT = "events/fuse/fuse_request_send"
_BUFFER_KIB = 8192  # for each processor: 100,000 messages
_OPCODE = re.compile(rb"\(FUSE_(\w+)\)")
# RELEASE and readahead are sent when no client waits for them; when none has come for so long, all have.
_SETTLE_S = 0.05
_SETTLE_MAX_S = 2.0


class Messages:
    """Of one connection, by the opcodes' names."""

    def __init__(self, instance: Path) -> None:
        self._instance = instance

    def take(self) -> Counter[str]:
        """Those since the last time.

        Raises  OSError(ENOBUFS): there were too many to count
        """
        self._settle()
        if self._sum(b"overrun") or self._sum(b"dropped events"):
            raise OSError(errno.ENOBUFS, "more messages than the buffer holds")
        trace = self._instance / "trace"
        found = Counter(name.decode() for name in _OPCODE.findall(trace.read_bytes()))
        trace.write_bytes(b"")
        return found

    def _settle(self) -> None:
        deadline_s = time.monotonic() + _SETTLE_MAX_S
        seen = -1
        while (now := self._sum(b"entries")) != seen and time.monotonic() < deadline_s:
            seen = now
            time.sleep(_SETTLE_S)

    def _sum(self, key: bytes) -> int:
        """A figure of all processors' buffers."""
        stats = (path.read_bytes() for path in self._instance.glob("per_cpu/cpu*/stats"))
        return sum(int(line.partition(b":")[2]) for text in stats for line in text.splitlines() if line.startswith(key))


def can_count() -> bool:
    """Whether this kernel traces FUSE; it also has tracefs mounted then."""
    if not (_TRACING / "instances").exists():
        subprocess.run(["mount", "-t", "tracefs", "none", _TRACING], check=False, capture_output=True)
    return (_TRACING / _EVENT).exists()


@contextlib.contextmanager
def counted(connection: int) -> Iterator[Messages]:
    """The messages of one FUSE connection from now on, in a trace buffer of our own.

    connection  its number in fusectl: the minor device number of the mount
    """
    # Not by the pid alone: another pid namespace has the same ones.
    instance = _TRACING / "instances" / f"trashd-bench-{os.getpid()}-{time.monotonic_ns()}"
    instance.mkdir()
    try:
        (instance / "buffer_size_kb").write_text(str(_BUFFER_KIB), encoding="ascii")
        (instance / _EVENT / "filter").write_text(f"connection == {connection}", encoding="ascii")
        (instance / _EVENT / "enable").write_text("1", encoding="ascii")
        yield Messages(instance)
    finally:
        instance.rmdir()
