"""The shared filesystems that tests run on, by their names, and what the machine must have for each."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest

from tests.support.shared_cephfs import ceph_filesystem
from tests.support.shared_filesystems import SharedFilesystem
from tests.support.shared_gluster import gluster_filesystem
from tests.support.shared_juicefs import juicefs_filesystem
from tests.support.shared_moosefs import moosefs_filesystem
from tests.support.shared_nodes import Nodes, local_nodes
from tests.support.shared_sshfs import sshfs_filesystem

_FILESYSTEMS: Mapping[str, Callable[[Path], AbstractContextManager[SharedFilesystem]]] = MappingProxyType(
    {
        "glusterfs": gluster_filesystem,
        "moosefs": moosefs_filesystem,
        "juicefs": juicefs_filesystem,
        "sshfs": sshfs_filesystem,
        "cephfs": ceph_filesystem,
    }
)
PARAMETERS = [pytest.param(name, marks=pytest.mark.needs("root", "fuse", name)) for name in _FILESYSTEMS]
"""Of a fixture; the names of machine_capabilities are those of the filesystems."""


class Bed(NamedTuple):
    """A filesystem that is up, for many tests.

    nodes  two fresh nodes on a fresh directory of it
    """

    filesystem: str
    nodes: Callable[[], AbstractContextManager[Nodes]]


@contextmanager
def bed(name: str) -> Iterator[Bed]:
    """Such a filesystem, mounted by two clients; at the end of the block nothing is left of it."""
    with tempfile.TemporaryDirectory(prefix="shared-") as scratch:
        base = Path(scratch)
        base.chmod(0o755)
        with _FILESYSTEMS[name](base) as filesystem:
            yield Bed(name, lambda: local_nodes(name, filesystem, base))
