"""Which disk a mount has: two mounts of one disk are one volume, a copy of it on another disk is another."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from typing import NamedTuple

from fusefs.core.printable_names import unescape
from fusefs.linux.machine_identity import boot_id
from fusefs.linux.mountinfo import Mount

_UTAB = "/run/mount/utab"


class Disk(NamedTuple):
    """What a filesystem lies on, as long as the machine is up and nobody puts another medium in.

    name      the boot, the device, and which of its media that is (`diskseq`; kernels before 5.15 have none)
    is_block  whether it is a block device; FUSE mounts never count, since any user makes them
    is_users  whether a user had it mounted, by udisks or a line of fstab with `user`
    """

    name: str
    is_block: bool
    is_users: bool = False


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
    return Disk(f"{boot_id()} {device} {_medium(device)}", is_block, is_block and _is_users(mount.point))


def _is_users(point: bytes) -> bool:
    """Whether libmount noted that a mount was not made by root's own wish. Source  mount(8), `uhelper` and `user`"""
    with suppress(OSError), open(_UTAB, "rb") as lines:
        for line in lines:
            fields = dict(field.partition(b"=")[::2] for field in line.split())
            if unescape(fields.get(b"TARGET", b""), b"\\", 3, 8) == point:
                options = fields.get(b"OPTS", b"").split(b",")
                return any(option == b"user" or option.startswith((b"user=", b"uhelper=")) for option in options)
    return False


def _medium(device: str) -> str:
    """The number that the kernel gave to what is in a device now; of a partition that of its disk; empty if unknown."""
    for place in (f"/sys/dev/block/{device}", f"/sys/dev/block/{device}/.."):
        with suppress(OSError), open(f"{place}/diskseq", encoding="ascii") as file:
            return file.read(32).strip()
    return ""
