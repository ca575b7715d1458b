"""Matches printed as a sweep finds them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence

from fusefs.cli import output
from fusefs.core.names import join, printable
from fusefs.core.selection import letter_of
from fusefs.linux.batches import look_at_all
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel, Refused

Prints = Callable[[Kernel, Fd, bytes, Sequence[str]], Refused]
"""Called with an open directory, its path relative to the sweep's, and names in it; gives those that it can't tell."""


def paths(directory: bytes, end: bytes) -> Prints:
    """Prints paths as find does, beginning with the directory as it was typed."""
    is_seen = end == b"\n" and sys.stdout.isatty()

    def tell(_kernel: Kernel, _fd: Fd, upper: bytes, names: Sequence[str]) -> Refused:
        above = join(directory.rstrip(b"/"), upper) + b"/"
        found = (above + os.fsencode(name) for name in names)
        lines = (printable(path).encode() for path in found) if is_seen else found
        sys.stdout.buffer.write(b"".join(line + end for line in lines))
        return []

    return tell


def objects(directory: bytes) -> Prints:
    """Prints an object for each that can be looked at."""

    def tell(kernel: Kernel, fd: Fd, upper: bytes, names: Sequence[str]) -> Refused:
        above = join(directory.rstrip(b"/"), upper)
        looked, refused = look_at_all(kernel, fd, names)
        for st in looked:
            found = {
                "path": output.plain(above + b"/" + os.fsencode(st.name)),
                "type": letter_of(st.st_mode),
                "size": st.st_size,
                "mtime_ns": st.st_mtime_ns,
                "uid": st.st_uid,
                "gid": st.st_gid,
            }
            sys.stdout.write(json.dumps(found) + "\n")
        return refused

    return tell
