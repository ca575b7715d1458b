"""What becomes of a match whose name is taken where it goes."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from itertools import count

from fusefs.linux.kernel import Kernel
from fusefs.sweep.request import IfExists


def candidates(name: bytes, if_exists: IfExists) -> Iterator[bytes]:
    """The names that a match may get, the best first."""
    yield name
    if if_exists is IfExists.NUMBER:
        for number in count(1):
            yield numbered(name, number)


def numbered(name: bytes, number: int) -> bytes:
    """A name with a number."""
    return b"%s.%d" % (name, number)


def check_replaceable(kernel: Kernel, dir_fd: int, name: bytes, began_ns: int) -> os.stat_result:
    """What has a name, if it may be replaced: what came there since the sweep began may be another match of it.

    began_ns  by the clock that the filesystem gives ctimes from
    Raises    OSError: EEXIST
    """
    st = kernel.stat(dir_fd, name)
    if st.st_ctime_ns >= began_ns:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
    return st
