"""Files whose data may be in an archive alone (HSM), so that to read them would have it brought back, from tape even.

Not run on either: told by what a stat says on filesystems that have archives, and no other is ever doubted. A file that
is one hole, or that a ZFS below has compressed to nothing, looks the same.
"""

from __future__ import annotations

import os

from fusefs.linux.kernel import Kernel

_BLOCKS_OF_RELEASED = {0x0BD00BD0: 1, 0x47504653: 0}
"""Lustre tells one block of a released file, lest tar takes it for a hole (LU-3864); Storage Scale none."""
_SMALL_BYTES = 4096
"""Scale keeps what is small in the inode, and Lustre may tell one block of a page that is not yet written."""


def may_be_archived(kernel: Kernel, fd: int) -> bool:
    """Whether to read a regular file (O_PATH will do) may have its data brought back from an archive."""
    blocks = _BLOCKS_OF_RELEASED.get(kernel.filesystem(fd))
    if blocks is None:
        return False
    st = os.fstat(fd)
    return st.st_size > _SMALL_BYTES and st.st_blocks == blocks
