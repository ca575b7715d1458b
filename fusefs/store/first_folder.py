"""The first command of somebody in a store: his folder is made, or taken out of what was there before."""

from __future__ import annotations

import os
import time

from fusefs.core.errors import Busy
from fusefs.store.folders import open_user
from fusefs.store.layout import Store, UserFolder
from fusefs.store.new_folder import make_proven, make_user
from fusefs.store.set_aside import take_own
from fusefs.store.upgrade import bring_up_to_date, is_current

_TURNS, _TURN_S = 100, 0.02


def first_folder(store: Store) -> UserFolder:
    """The caller's folder, who had none when he looked. Raises  OSError; NoStore; Busy"""
    uid = os.geteuid()
    if store.owner == uid and not is_current(store):
        bring_up_to_date(store)
    if store.owner == 0 == uid:
        return make_roots(store, 0)
    take_own(store)
    return open_user(store, uid) or make_user(store)


def make_roots(store: Store, uid: int) -> UserFolder:
    """A user's folder in a store of root's, made by root if missing. Raises  OSError; NoStore; Busy"""
    for _turn in range(_TURNS):
        folder = make_proven(store, uid)
        if folder is not None:
            return folder
        time.sleep(_TURN_S)  # another process of root's registers somebody; a command needs some milliseconds for it
    raise Busy(store.base_path)
