"""Root vouches for a store that he made: on it, or where that can't be, in his registry of stores."""

from __future__ import annotations

from fusefs.store.layout import Store
from fusefs.store.made import Made, note_made


def vouch(store: Store) -> bool:
    """Have it known from now on, durably, that root made a store; whether it is. Needs root. Raises  OSError"""
    if store.judged().made is Made.BY_ROOT:
        return True
    if note_made(store.kernel, store.fd):
        store.kernel.fsync(store.fd)
        return True
    from fusefs.store.registering import write  # most filesystems have attributes
    from fusefs.store.registry import describe

    return not write(store.kernel, describe(store))
