"""Where an administrator said so (`authority = "root"`): root takes over what its owner could not delete."""

from __future__ import annotations

from contextlib import ExitStack

from fusefs.core.errors import NotFound
from fusefs.core.names import ContainerId
from fusefs.linux.act_as_user import user_name
from fusefs.linux.mountinfo import below
from fusefs.service.child_answers import ForRoot
from fusefs.service.open_volume import OpenVolume
from fusefs.store.claim import ClaimLost
from fusefs.store.layout import Store, open_store
from fusefs.store.seize import seize
from fusefs.store.swap_path import own_folder
from fusefs.store.user_folders import open_user


def take_over(opened: OpenVolume, wanted: ForRoot) -> ContainerId | None:
    """The id of root's orphan, due at once, that was in a user's quarantine; None if another process has it by now.

    Raises  TrashdError; OSError
    """
    with ExitStack() as owned:
        store = _store_of(opened.store, wanted.base, owned)
        folder = open_user(store, wanted.uid)
        if folder is None:
            raise NotFound(wanted.id)
        owned.enter_context(folder)
        own = owned.enter_context(own_folder(store))
        note = f"{user_name(wanted.uid)} could not delete it; the configuration gives root the right"
        seized = seize(folder, wanted.id, own, note, 0)
        return None if isinstance(seized, ClaimLost) else seized.id


def _store_of(upper: Store, base: bytes, owned: ExitStack) -> Store:
    """The store with that base: the one that is open, or one below it."""
    if base == upper.base_path:
        return upper
    way = below(base, upper.base_path)
    sides = upper.base.beneath(upper.kernel, way)
    lower = open_store(upper.kernel, sides, base)
    if lower is None:
        raise NotFound(base)
    return owned.enter_context(lower)
