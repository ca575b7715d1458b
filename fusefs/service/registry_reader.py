"""The process that reads users' registries for root's service: it may wait for a disk or a user, the service does not.

It is a child of the forker, so that it has no threads; it ends with what it was asked.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress

import msgspec

from fusefs.linux.act_as_user import person
from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import read_mounts
from fusefs.linux.runtime_directories import STATE_BELOW_HOME
from fusefs.linux.untrusted_path import open_way
from fusefs.service.messages import MESSAGE_MAX, UserRegistry
from fusefs.service.open_own_store import ROOTS, is_own
from fusefs.service.own_store_limits import MOST_STORES
from fusefs.store.registry_targets import LineOf, stores_of_users

_MOST_BYTES, _LINE_BYTES = MESSAGE_MAX * 3 // 4, 700
"""Of a message, and what a line has besides its path: a user with very long paths has fewer stores served."""


def tell_homes(channel: socket.socket, uids: Iterable[int]) -> None:
    """Say what all users' registries name, one user a packet. Raises  OSError: the service is gone"""
    kernel, mounts = Kernel(), read_mounts()
    homes: dict[int, list[LineOf]] = {}
    for word in stores_of_users(kernel, mounts, uids):
        homes.setdefault(word.uid, []).append(word)
    for uid, words in homes.items():
        home = _home(uid, [word for word in words if is_own(kernel, word, mounts)])
        fds: list[int] = []
        with suppress(OSError):
            fds.append(open_way(kernel, os.path.join(person(uid).home, STATE_BELOW_HOME), mounts, ROOTS))
        try:
            socket.send_fds(channel, [msgspec.json.encode(home)], fds)
        finally:
            for fd in fds:
                os.close(fd)


def _home(uid: int, words: Sequence[LineOf]) -> UserRegistry:
    """The newest of a user's stores, as many as are served."""
    told: list[LineOf] = []
    n_bytes = 0
    for word in reversed(words[-MOST_STORES:]):
        n_bytes += 2 * len(word.line.path) + _LINE_BYTES
        if n_bytes > _MOST_BYTES:
            break
        told.insert(0, word)
    return UserRegistry(uid, told, len(words) - len(told))
