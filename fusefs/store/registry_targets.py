"""The targets of a registry's lines now: a store, nothing yet, nothing for good, or a mount that does not answer."""

from __future__ import annotations

import errno
import os
from collections.abc import Container, Hashable, Iterator, Sequence
from contextlib import ExitStack
from enum import Enum
from typing import NamedTuple

from fusefs.core.errors import BrokenStore, TrashdError
from fusefs.core.identity import Likelihood, compare
from fusefs.core.names import STORE
from fusefs.linux.answer_timeout import ask_each
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import Mount, covering
from fusefs.linux.untrusted_path import open_way
from fusefs.store.backing_and_mount import READABLE
from fusefs.store.layout import Store, open_store, trusted_owners
from fusefs.store.mounted_paths import shown_of
from fusefs.store.registry_lines import RegistryLine

_MISSING = (errno.ENOENT, errno.ENOTDIR)


class RegistryTarget(Enum):
    """What is found at the end of a line.

    ABSENT  not there; the disk may not be mounted, so it may come back
    GONE    its filesystem is there, and it is not
    SILENT  no answer from there
    """

    THERE = "there"
    ABSENT = "absent"
    GONE = "gone"
    SILENT = "silent"


class LineOf(NamedTuple):
    """A line of a registry: of root's own, it is true; of a user's it counts for that user's own store alone."""

    uid: int
    line: RegistryLine


def follow(kernel: Kernel, words: Sequence[LineOf], mounts: Sequence[Mount]) -> Iterator[tuple[LineOf, RegistryTarget]]:
    """Each line, and where it leads; looked at by a child, as a mount may never answer."""
    uid = os.geteuid()
    trusted = trusted_owners(uid)
    silent = kernel.silent
    if any(word.uid != uid for word in words):
        silent = set(silent)

    def ask(word: LineOf) -> bytes:
        return look(kernel, word.line, mounts, trusted).value.encode()

    def where(word: LineOf) -> Hashable:
        mount = covering(word.line.path, mounts)
        # What one user's path leads to by a link may be silent, where others' paths are not.
        return mount if word.uid == uid or mount in kernel.silent else (word.uid, mount)

    for word, answer in ask_each(words, ask, silent, where):
        told = None if answer is None else answer.decode() or RegistryTarget.ABSENT.value
        yield word, RegistryTarget.SILENT if told is None else RegistryTarget(told)


def look(kernel: Kernel, one: RegistryLine, mounts: Sequence[Mount], trusted: Container[int]) -> RegistryTarget:
    """Where a line leads. May take for ever"""
    try:
        base = open_way(kernel, one.path, mounts, trusted)
    except OSError as error:
        missing = error.errno in _MISSING and _was_here(kernel, one, mounts, trusted)
        return RegistryTarget.GONE if missing else RegistryTarget.ABSENT
    with base:
        try:
            with kernel.open_beneath(base, STORE, READABLE) as fd:
                known = compare(kernel.identify(fd), one.identity)
        except OSError as error:
            if error.errno not in _MISSING:
                return RegistryTarget.ABSENT
            known = Likelihood.OTHER
        if known is not Likelihood.OTHER:
            return RegistryTarget.THERE
        return RegistryTarget.GONE if _is_on(base, one) else RegistryTarget.ABSENT


def _was_here(kernel: Kernel, one: RegistryLine, mounts: Sequence[Mount], trusted: Container[int]) -> bool:
    """Whether the lowest directory that is left of a path is on the filesystem that a store was on."""
    path = one.path
    while path != b"/":
        path = os.path.dirname(path)
        try:
            with open_way(kernel, path, mounts, trusted) as fd:
                return _is_on(fd, one)
        except OSError as error:
            if error.errno not in _MISSING:
                return False
    return False


def _is_on(fd: Fd, one: RegistryLine) -> bool:
    return one.filesystem != 0 and os.fstatvfs(fd).f_fsid & (1 << 64) - 1 == one.filesystem


def open_registered(kernel: Kernel, word: LineOf, mounts: list[Mount]) -> Store | None:
    """The store that a line names; None if it does not lead to just that one. May take for ever: ask `follow` before.

    Of another's registry it must be that user's own store, and root opens it for that user alone.
    Raises  BrokenStore, of the caller's own registry
    """
    line, of = word.line, None if word.uid == os.geteuid() else word.uid
    try:
        base = open_way(kernel, line.path, mounts, trusted_owners(os.geteuid()))
        shown = shown_of(kernel, base, mounts)
        store = open_store(kernel, shown, line.path, of=of)
    except (OSError, TrashdError) as error:
        if isinstance(error, BrokenStore) and of is None:
            raise
        return None
    if store is None:
        return None
    with ExitStack() as owned:
        owned.enter_context(store)
        if store.volume.id != line.volume or compare(kernel.identify(store.fd), line.identity) is Likelihood.OTHER:
            return None
        owned.pop_all()
    return store._replace(is_named=True)
