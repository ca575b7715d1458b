"""The shared filesystems that tests run on, by their names, and what the machine must have for each."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import pytest

from tests.support.cluster_nodes import ClusterNodes, Hung, local_nodes
from tests.support.shared_cephfs import ceph_filesystem
from tests.support.shared_filesystems import SharedFilesystem
from tests.support.shared_gluster import gluster_filesystem
from tests.support.shared_juicefs import juicefs_filesystem
from tests.support.shared_moosefs import moosefs_filesystem
from tests.support.shared_sshfs import sshfs_filesystem

_Maker = Callable[[Path], AbstractContextManager[SharedFilesystem]]


class Bed(Protocol):
    """A filesystem that is up, for many tests."""

    def nodes(self) -> AbstractContextManager[ClusterNodes]:
        """Two nodes whose volume is a fresh directory of it."""


class _LocalBed:
    """Servers and clients in namespaces of this machine; started anew when a test has left them of no use."""

    def __init__(self, name: str, make: _Maker) -> None:
        self._name = name
        self._make = make
        self._up = ExitStack()
        self._base = Path()
        self._filesystem: SharedFilesystem | None = None

    def close(self) -> None:
        """Stop all of it."""
        self._filesystem = None
        self._up.close()

    @contextmanager
    def nodes(self) -> Iterator[ClusterNodes]:
        """See Bed."""
        with ExitStack() as stack:
            try:
                made = stack.enter_context(local_nodes(self._name, self._served(), self._base))
            except Hung:
                self.close()
                made = stack.enter_context(local_nodes(self._name, self._served(), self._base))
            yield made

    def _served(self) -> SharedFilesystem:
        if self._filesystem is None:
            self._base = Path(self._up.enter_context(tempfile.TemporaryDirectory(prefix="shared-")))
            self._base.chmod(0o755)
            self._filesystem = self._up.enter_context(self._make(self._base))
        return self._filesystem


@contextmanager
def _local_bed(name: str, make: _Maker) -> Iterator[Bed]:
    served = _LocalBed(name, make)
    try:
        yield served
    finally:
        served.close()


BEDS: Mapping[str, Callable[[], AbstractContextManager[Bed]]] = MappingProxyType(
    {
        "glusterfs": partial(_local_bed, "glusterfs", gluster_filesystem),
        "moosefs": partial(_local_bed, "moosefs", moosefs_filesystem),
        "juicefs": partial(_local_bed, "juicefs", juicefs_filesystem),
        "sshfs": partial(_local_bed, "sshfs", sshfs_filesystem),
        "cephfs": partial(_local_bed, "cephfs", ceph_filesystem),
    }
)
"""Each is up for the block. What has nodes of another kind is one more line here."""
_OF_HOURS = ("cephfs",)
"""Those whose servers take a minute where little is to be had: `make shared` alone has them."""
PARAMETERS = [
    pytest.param(name, marks=pytest.mark.needs("root", "fuse", name, *(["hours"] if name in _OF_HOURS else [])))
    for name in BEDS
]
"""Of a fixture; in machine_capabilities the filesystems have the same names."""
