"""The registry of the stores that a user uses: it names each, so that one in a home directory is found too.

Each user has one below their home, and root its own, which no user can write. A line tells the store's identity besides
its path: a copy is another store, which is not vouched for.
"""

from __future__ import annotations

import os

from fusefs.core.identity import Likelihood, compare
from fusefs.linux.kernel import Kernel
from fusefs.linux.runtime_directories import HOME
from fusefs.store.layout import Store
from fusefs.store.registry_lines import (
    RegistryLine,
    decode,
    encode,
    read_own,
)
from fusefs.store.store_maker import StoreMaker, is_noted, note_made


def describe(store: Store) -> RegistryLine:
    """What a registry is to say of a store. Raises  OSError"""
    filesystem = os.fstatvfs(store.fd).f_fsid & (1 << 64) - 1
    return RegistryLine(store.kernel.identify(store.fd), store.volume.id, filesystem, place_of_store(store), store.name)


def place_of_store(store: Store) -> bytes:
    """The directory that holds a store, where it is without a mount of ours. Raises  OSError"""
    path = os.readlink(store.base.fd.path())
    if store.base.mounted is not None and (path.startswith(HOME + b"/") or not _leads_to(store.kernel, path, store)):
        return store.base_path  # of a mount over itself: when that is gone, the store is there
    return path


def _leads_to(kernel: Kernel, path: bytes, store: Store) -> bool:
    try:
        return os.path.samestat(os.stat(path), kernel.fstat(store.base.fd))
    except OSError:
        return False


def is_remembered(store: Store) -> bool:
    """Whether the caller's registry names a store: its identity, and a path that leads to just that one.

    A copy that stands elsewhere is another store, be it a copy of the whole disk.
    """
    try:
        one = describe(store)
        text = read_own()
    except OSError:
        return False
    return _has(text, encode(one)) or any(is_same(one, other) for other in decode(text))


def is_same(one: RegistryLine, other: RegistryLine) -> bool:
    """Whether two lines mean one store at one place."""
    known = compare(one.identity, other.identity)
    return known is not Likelihood.OTHER and (one.volume, one.store()) == (other.volume, other.store())


def _has(text: bytes, line: bytes) -> bool:
    return text.startswith(line) or b"\n" + line in text


def remember(store: Store) -> str:
    """Have the caller's registry name a store that is used; why it does not, a clause for a person, or nothing.

    Without a home, or in one that can't be written, it does not: then whatever is told of the store says where it is.
    Root's names no user's store: that is its owner's to do. Nor is a copy vouched for by being used, or what another
    user may have made of root's directories.
    """
    if os.geteuid() == 0 != store.owner:
        return "it is a user's own: he notes it"
    if store.is_roots_to_keep() and store.made is not StoreMaker.BY_ROOT:
        return "nobody can tell that root made it"
    try:
        one = describe(store)
        try:
            if _has(read_own(), encode(one)):
                return ""
        except FileNotFoundError:
            pass
        if compare(one.identity, store.volume.store) is Likelihood.OTHER:
            return "it is a copy of another one"
        from fusefs.store.registry_targets import add_line  # only the first use of a store needs it

        return add_line(store.kernel, one)
    except OSError as error:
        return error.strerror or "it can't be written"


def vouch(store: Store) -> bool:
    """Have it known from now on, durably, that root made a store; whether it is. Needs root. Raises  OSError"""
    if is_noted(store.kernel, store.fd):
        return True
    if note_made(store.kernel, store.fd):
        store.kernel.fsync(store.fd)
        return True
    if store.judged().made is StoreMaker.BY_ROOT:
        return True
    from fusefs.store.registry_targets import add_line  # only the first use of a store needs it

    return not add_line(store.kernel, describe(store))
