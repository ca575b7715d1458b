"""Services of several machines on one volume: each has its mount of it, host name, machine id and boot."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tests.support.mount_namespaces import be_machine
from tests.support.real_filesystems import tmpfs_volume
from tests.support.service_process import QUICK, Service, service
from tests.support.sshfs_volumes import sshfs_of
from tests.support.store_calls import init
from tests.support.trashd_command import Done, trashd

_MACHINE_ID, _BOOT_ID = Path("/etc/machine-id"), Path("/proc/sys/kernel/random/boot_id")
UNCACHED = ("dir_cache=no", "entry_timeout=0", "attr_timeout=0")
POLLED = 'poll = "1s"\n' + QUICK
"""Beats and looks for what others did come each second."""


class Machines(NamedTuple):
    """Two mounts of one directory."""

    a: Path
    b: Path


class Node(NamedTuple):
    """The service of one machine. volume: as it is mounted there"""

    name: str
    base: Path
    volume: Path
    running: Service

    def status(self, *options: str) -> Done:
        return trashd("status", *options, RUNTIME_DIRECTORY=str(self.base / "run"))


@contextlib.contextmanager
def machines_at_one_volume() -> Iterator[Machines]:
    """An sshfs of a tmpfs that is mounted twice, with a store: neither mount sees the locks of the other."""
    with tmpfs_volume() as base:
        (backing := base / "backing").mkdir()
        with sshfs_of(backing, base / "a", UNCACHED) as a, sshfs_of(backing, base / "b", UNCACHED) as b:
            init(a.path)
            init(b.path, is_known=True)  # that filesystem keeps no attribute by which root knows its own
            yield Machines(a.path, b.path)


def boot_of(name: str) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_DNS, name))


@contextlib.contextmanager
def node(base: Path, name: str, volume: Path, config: str = POLLED) -> Iterator[Node]:
    """The service of a machine of that name, ready; stopped at the end, unless it was killed. base: of `places`"""
    own = base / name
    (own / "run").mkdir(parents=True, exist_ok=True)
    (own / "machine-id").write_text(uuid.uuid5(uuid.NAMESPACE_URL, name).hex + "\n")
    (own / "boot_id").write_text(boot_of(name) + "\n")
    files = {_MACHINE_ID: own / "machine-id", _BOOT_ID: own / "boot_id"}
    with service(own, volume, config=config, runtime=own / "run", prepare=partial(be_machine, name, files)) as running:
        yield Node(name, own, volume, running)
