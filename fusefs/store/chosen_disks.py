"""Which of several disks with one volume's id is the volume, as `trashd init` says to that user's service; until the
next boot.
"""

from __future__ import annotations

import os
from contextlib import suppress

from fusefs.core.errors import TrashdError
from fusefs.linux.atomic_files import replace_file
from fusefs.linux.boot_id import boot_id
from fusefs.linux.disks import disk_of
from fusefs.linux.mountinfo import below, find_mount, read_mounts
from fusefs.linux.runtime_directories import lasting_dir, make_dir
from fusefs.store.layout import Store, open_store
from fusefs.store.mounted_paths import open_shown

_FILE = b"chosen-disks"
_MOST_BYTES = 1 << 16


def read_chosen() -> dict[str, str]:
    """The names of the disks that were chosen in this boot, by their volume's id; by the caller alone."""
    try:
        with open(os.path.join(lasting_dir(), _FILE), encoding="ascii") as file:
            lines = file.read(_MOST_BYTES).splitlines()
    except (OSError, ValueError):
        return {}
    chosen = (line.partition(" ") for line in lines)
    return {volume: disk for volume, _blank, disk in chosen if disk.startswith(boot_id())}


def choose_among_copies(store: Store) -> list[bytes]:
    """Note that a store's disk is the volume, if copies of it are mounted; where these are. Raises  OSError"""
    kernel, mounts = store.kernel, read_mounts()
    mount = find_mount(kernel, store.fd, mounts)
    disk = disk_of(mount)
    if mount is None or not disk.is_block:
        return []
    way, copies = below(store.base_path, mount.point), list[bytes]()
    for one in mounts:
        other = disk_of(one)
        if other.is_block and other.name != disk.name:
            path = os.path.join(one.point, way) if way else one.point
            with suppress(OSError, TrashdError):
                found = open_store(kernel, open_shown(kernel, path, mounts), path)
                if found is not None:
                    with found:
                        copies += [path] if found.volume.id == store.volume.id else []
    if copies:
        chosen = {**read_chosen(), str(store.volume.id): disk.name}
        text = "".join(f"{volume} {name}\n" for volume, name in chosen.items())
        replace_file(os.path.join(make_dir(lasting_dir()), _FILE), text.encode(), 0o600)
    return copies
