"""What a tree takes, kept in its record once it is known: a walk need not be done twice."""

from __future__ import annotations

from contextlib import suppress

from fusefs.core.errors import BadRecord
from fusefs.core.lifecycle import State
from fusefs.core.names import ContainerId
from fusefs.core.record import TreeSize
from fusefs.store.claim import hold
from fusefs.store.container import HeldContainer, rewrite, touch
from fusefs.store.layout import UserFolder


def keep_size(folder: UserFolder, container: ContainerId, size: TreeSize) -> None:
    """Note in an orphan's record what it takes; to be run as the folder's owner.

    Where that can't be (somebody has it, it is gone, the volume is full or read-only) nothing is noted.
    """
    with suppress(OSError, BadRecord):
        held = hold(folder, State.ORPHANS, container)
        if isinstance(held, HeldContainer):
            with held:
                held = rewrite(held, held.record._replace(size=size))
                touch(folder.store.kernel, held.fd)  # the service's watch of orphans/ tells it


def forget_size(held: HeldContainer) -> HeldContainer:
    """The container before something is taken out of its tree. On a full volume what it took stays noted."""
    with suppress(OSError):
        if held.record.size is not None:
            held = rewrite(held, held.record._replace(size=None))
    return held
