"""Which disk a mount has: two mounts of one disk are one volume, a copy of it on another disk is another."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from typing import NamedTuple

from fusefs.linux.boot_id import boot_id
from fusefs.linux.mountinfo import Mount


class Disk(NamedTuple):
    """What a filesystem lies on, as long as the machine is up and nobody puts another medium in.

    name      the boot, the device, and which of its media that is (`diskseq`; kernels before 5.15 have none)
    is_block  whether it is a block device, as only root mounts one; FUSE mounts never count, since any user makes them
    """

    name: str
    is_block: bool


def disk_of(mount: Mount | None) -> Disk:
    """The disk of a mount; without a name where we don't see what is mounted (a chroot), which is never the same."""
    if mount is None:
        return Disk("", is_block=False)
    device = mount.device.decode()
    if device.startswith("0:") and mount.source.startswith(b"/dev/"):
        # btrfs has a number of its own for a superblock, which is another one after the next mount.
        with suppress(OSError):
            st = os.stat(mount.source)
            if stat.S_ISBLK(st.st_mode):
                device = f"{os.major(st.st_rdev)}:{os.minor(st.st_rdev)}"
    is_block = not mount.is_fuse() and os.path.isdir(f"/sys/dev/block/{device}")
    return Disk(f"{boot_id()} {device} {_medium(device)}", is_block)


def _medium(device: str) -> str:
    """The number that the kernel gave to what is in a device now; of a partition that of its disk; empty if unknown."""
    for place in (f"/sys/dev/block/{device}", f"/sys/dev/block/{device}/.."):
        with suppress(OSError), open(f"{place}/diskseq", encoding="ascii") as file:
            return file.read(32).strip()
    return ""
