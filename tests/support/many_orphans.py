"""Very many small orphans, made by the store's own functions without what makes a single swap durable and slow."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from fusefs.core.lifecycle import State
from fusefs.core.names import Name, RelPath
from fusefs.core.record import Method, Record
from fusefs.linux.boot_id import boot_id, host_id
from fusefs.store.container import HeldContainer, create_record, make_directory, move, new_id
from fusefs.store.layout import TREE
from fusefs.store.stage import identify_at
from tests.support.store_verbs import own


def many_orphans(volume: Path, n: int, retention_s: int | None = 0) -> None:
    """So many orphans of the caller's, each an empty directory that was swapped or so its record says."""
    with own(volume) as folder:
        kernel = folder.store.kernel
        host, boot = host_id(), boot_id()
        for number in range(n):
            name = Name(b"job%d" % number)
            container = new_id(kernel, name)
            with ExitStack() as owned:
                fd = owned.enter_context(make_directory(folder, State.STAGE, container))
                kernel.mkdir(fd, TREE)
                record = Record(
                    id=container,
                    volume=folder.store.volume.id,
                    method=Method.REMOVED,
                    origin=RelPath(name),
                    parent=None,
                    fresh=None,
                    victim=identify_at(kernel, fd, TREE),
                    host=host,
                    boot=boot,
                    created_ns=kernel.now_ns(),
                    retention_s=retention_s,
                )
                owned.enter_context(create_record(folder.store, fd, record))
                move(HeldContainer(folder, container, State.STAGE, fd, record, owned), State.ORPHANS)
