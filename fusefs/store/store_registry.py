"""The present targets of a registry's lines: a store, nothing yet, nothing for good, or a mount that does not answer.

A registry is rewritten as a whole, under a lock, without stores that are gone. For root, users' registries are read by
children with the users' uids, and no link of theirs is followed. Root finds users in the account database, and others
by their folders in stores. A registry is searched below the home directory in the account database, as root does not
know a user's $XDG_STATE_HOME.
"""

from __future__ import annotations

import errno
import os
import pwd
import stat
import time
from collections import Counter
from collections.abc import Container, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from enum import Enum
from itertools import islice
from typing import NamedTuple

from fusefs.core.errors import BrokenStore, TrashdError
from fusefs.core.identity import Likelihood, compare
from fusefs.core.names import Name, whose_store
from fusefs.linux.children import ask_each, person
from fusefs.linux.fd import Fd
from fusefs.linux.file_locks import take
from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import Mount, covering, read_mounts
from fusefs.linux.runtime_directories import STATE_BELOW_HOME, lasting_dir, make_dir, replace_file
from fusefs.linux.untrusted_path import open_way
from fusefs.store.backing_and_mount import READABLE, BackingAndMount
from fusefs.store.layout import Store, names_of_users, open_store, trusted_owners
from fusefs.store.mounted_paths import shown_of
from fusefs.store.registry_lines import (
    MAX_BYTES,
    MAX_LINES,
    STORES,
    RegistryLine,
    decode,
    encode,
    read_registry,
)

_MISSING = (errno.ENOENT, errno.ENOTDIR)


class RegistryTarget(Enum):
    """What a line leads to.

    ABSENT  missing; the disk may be unmounted, so it may come back
    GONE    missing on its filesystem, which is mounted
    SILENT  no answer
    """

    THERE = "there"
    ABSENT = "absent"
    GONE = "gone"
    SILENT = "silent"


class LineOf(NamedTuple):
    """A line of a user's registry. Root's own is trusted; a user's counts only for that user's own store."""

    uid: int
    line: RegistryLine


def follow(
    kernel: Kernel, entries: Sequence[LineOf], mounts: Sequence[Mount]
) -> Iterator[tuple[LineOf, RegistryTarget]]:
    """Each line and its target; children check, as a mount may never answer."""
    uid = os.geteuid()
    trusted = trusted_owners(uid)
    silent = kernel.silent
    if any(entry.uid != uid for entry in entries):
        silent = set(silent)

    def ask(entry: LineOf) -> bytes:
        return look(kernel, entry.line, mounts, trusted).value.encode()

    def where(entry: LineOf) -> Hashable:
        mount = covering(entry.line.path, mounts)
        # A user's path may lead through a link to a silent mount, where other users' paths do not.
        return mount if entry.uid == uid or mount in kernel.silent else (entry.uid, mount)

    for entry, answer in ask_each(entries, ask, silent, where):
        if answer is None:
            yield entry, RegistryTarget.SILENT
        else:
            yield entry, RegistryTarget(answer.decode() or RegistryTarget.ABSENT.value)


def look(kernel: Kernel, one: RegistryLine, mounts: Sequence[Mount], trusted: Container[int]) -> RegistryTarget:
    """The target of a line. This may block forever"""
    try:
        base = open_way(kernel, one.path, mounts, trusted)
    except OSError as error:
        missing = error.errno in _MISSING and _was_here(kernel, one, mounts, trusted)
        return RegistryTarget.GONE if missing else RegistryTarget.ABSENT
    with base:
        try:
            with kernel.open_beneath(base, one.name, READABLE) as fd:
                known = compare(kernel.identify(fd), one.identity)
        except OSError as error:
            if error.errno not in _MISSING:
                return RegistryTarget.ABSENT
            known = Likelihood.OTHER
        if known is not Likelihood.OTHER:
            return RegistryTarget.THERE
        return RegistryTarget.GONE if _is_on(base, one) else RegistryTarget.ABSENT


def _was_here(kernel: Kernel, one: RegistryLine, mounts: Sequence[Mount], trusted: Container[int]) -> bool:
    """Whether the lowest existing directory of a path is on the filesystem that the store was on."""
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


def open_registered(kernel: Kernel, entry: LineOf, mounts: list[Mount]) -> Store | None:
    """Open the store that a line names; None if it leads to another one or none. May block forever: use `follow` first.

    If the line is from another user's registry, it must be that user's own store, and root opens it for that user only.
    Raises  BrokenStore, for the caller's own registry
    """
    line, of = entry.line, None if entry.uid == os.geteuid() else entry.uid
    try:
        base = open_way(kernel, line.path, mounts, trusted_owners(os.geteuid()))
        shown = shown_of(kernel, base, mounts)
        store = open_store(kernel, shown, line.path, line.name, of=of)
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


_MODE = 0o600


_GLANCES, _GLANCE_S = 50, 0.01


def add_line(kernel: Kernel, one: RegistryLine) -> str:
    """Add a line to the caller's registry. Return why that failed, as a clause for messages, or "".

    Raises  OSError
    """
    path = make_dir(lasting_dir())
    lock = _lock(path)
    if lock is None:
        return "another process holds the lock of the registry"
    with lock, Fd(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as directory:
        try:
            lines = decode(read_registry(directory))
        except FileNotFoundError:
            lines = []
        kept = [*_still_needed(kernel, lines, one), one]
        text = b"".join(map(encode, kept))
        if len(text) > MAX_BYTES or len(kept) > MAX_LINES:
            return "the registry is full of stores that still exist"
        replace_file(os.path.join(path, STORES), text, _MODE, is_durable=True)
        os.fsync(directory)
    return ""


def _lock(path: bytes) -> Fd | None:
    """Take the registry's lock; None if it stays taken: its holder should be about to write, or has been stopped."""
    for _glance in range(_GLANCES):
        lock = take(path, STORES + b".lock")
        if lock is not None:
            return lock
        time.sleep(_GLANCE_S)
    return None


def _still_needed(kernel: Kernel, lines: Sequence[RegistryLine], one: RegistryLine) -> list[RegistryLine]:
    """The lines to keep beside a new one; if there are too many, without those that are absent now."""
    entries = [LineOf(os.geteuid(), line) for line in lines]
    followed = [(entry.line, lead) for entry, lead in follow(kernel, entries, read_mounts())]
    kept = [
        (line, lead) for line, lead in followed if lead is not RegistryTarget.GONE and not _replaces(one, line, lead)
    ]
    n_bytes = sum(len(encode(line)) for line, _lead in kept) + len(encode(one))
    if len(kept) >= MAX_LINES or n_bytes > MAX_BYTES:
        kept = [(line, lead) for line, lead in kept if lead is not RegistryTarget.ABSENT]
    return [line for line, _lead in kept]


def _replaces(one: RegistryLine, line: RegistryLine, lead: RegistryTarget) -> bool:
    """Whether a new line replaces an old one: it has the same path, or the store's new path."""
    if one.volume != line.volume:
        return False
    known = compare(one.identity, line.identity)
    return one.store() == line.store() or (known is Likelihood.SAME and lead is not RegistryTarget.THERE)


MOST_ACCOUNTS = 10_000


_MOST_UNLISTED = 1000


_MOST_AT_ROOTS = 16

"""Limit of one user's own stores in all mount points together, as any user can make directories with such names."""


_FOUND = b"found"


class _RegistryHome(NamedTuple):
    uid: int
    path: bytes


def stores_of_users(kernel: Kernel, mounts: Sequence[Mount], uids: Iterable[int] = ()) -> Iterator[LineOf]:
    """The lines of all users' registries that lead to a store now; needs root.

    uids  of users who may be missing in the list of accounts, as a directory service need not list all
    A child that does not answer within a few seconds, because of its user or a mount, is skipped.
    """
    homes = _homes(kernel, uids)
    entries = [entry for home in _with_registry(kernel, homes, mounts) for entry in _entries_of(kernel, home, mounts)]
    yield from (entry for entry, lead in follow(kernel, entries, mounts) if lead is RegistryTarget.THERE)


def stores_at_roots(kernel: Kernel, points: Sequence[bytes], mounts: Sequence[Mount]) -> Iterator[LineOf]:
    """Users' own stores in some mount points, whether or not they are in a registry; needs root.

    A store's own file, which only its user can have put there, has its identity: so it is no copy of the store's files.
    A child that does not answer within a few seconds is skipped, as above.
    """

    def ask(point: bytes) -> bytes:
        try:
            with open_way(kernel, point, mounts, (0,)) as base:
                return b"\0".join(names_of_users(kernel, base))
        except OSError:
            return b""

    n_of: Counter[int] = Counter()
    for point, answer in ask_each(points, ask, kernel.silent, lambda point: covering(point, mounts)):
        for name in filter(None, (answer or b"").split(b"\0")):
            uid = whose_store(name)
            if uid is None:
                continue
            n_of[uid] += 1
            if n_of[uid] <= _MOST_AT_ROOTS:
                yield from _line_at_root(kernel, uid, os.path.join(point, name), mounts)


def _line_at_root(kernel: Kernel, uid: int, path: bytes, mounts: Sequence[Mount]) -> Iterator[LineOf]:
    """The registry line for a user's own store, made by a process of that user; none if it is no such store."""
    base_path, name = os.path.split(path)

    def ask(_path: bytes) -> bytes:
        try:
            base = BackingAndMount(open_way(kernel, base_path, mounts, trusted_owners(uid)))
            store = open_store(kernel, base, base_path, Name(name))
            if store is None:
                return b""
            with store:
                found = kernel.identify(store.fd)
                if store.volume.store is None or compare(found, store.volume.store) is Likelihood.OTHER:
                    return b""
                filesystem = os.fstatvfs(store.fd).f_fsid & (1 << 64) - 1
                return encode(RegistryLine(found, store.volume.id, filesystem, base_path, store.name))
        except (OSError, TrashdError):
            return b""

    ((_path, answer),) = ask_each((path,), ask, set(), lambda _path: uid, person(uid))
    yield from (LineOf(uid, line) for line in decode(answer or b"") if line.store() == path)


def _homes(kernel: Kernel, uids: Iterable[int]) -> list[_RegistryHome]:
    """Users' home directories by the account database, with a time limit, as a directory service may be slow."""

    def ask(uid: int | None) -> bytes:
        with suppress(KeyError):
            known = islice(pwd.getpwall(), MOST_ACCOUNTS) if uid is None else (pwd.getpwuid(uid),)
            return b"\0".join(b"%d:%s" % (one.pw_uid, os.fsencode(one.pw_dir)) for one in known)
        return b""

    def homes_of(asked: Sequence[int | None]) -> dict[int, bytes]:
        answers = (answer or b"" for _uid, answer in ask_each(asked, ask, kernel.silent, lambda _uid: pwd.__name__))
        pairs = (one.partition(b":") for answer in answers for one in answer.split(b"\0") if one)
        return {int(uid): path for uid, _colon, path in pairs}

    homes = homes_of((None,))
    homes |= homes_of([*islice((uid for uid in sorted(uids) if uid not in homes), _MOST_UNLISTED)])
    return [_RegistryHome(uid, path) for uid, path in homes.items() if uid != 0 and path.startswith(b"/")]


def _with_registry(kernel: Kernel, homes: Sequence[_RegistryHome], mounts: Sequence[Mount]) -> list[_RegistryHome]:
    """The home directories that seem to have a registry: most have none, and cost only a few calls."""

    def ask(home: _RegistryHome) -> bytes:
        try:
            with _open_place(kernel, home, mounts) as directory:
                st = os.stat(STORES, dir_fd=directory, follow_symlinks=False)
        except PermissionError:
            return _FOUND  # root of another host may not see it, but a process of its user may
        except OSError:
            return b""
        return _FOUND if stat.S_ISREG(st.st_mode) and st.st_uid == home.uid else b""

    asked = ask_each(homes, ask, kernel.silent, lambda home: covering(home.path, mounts))
    return [home for home, answer in asked if answer == _FOUND]


def _entries_of(kernel: Kernel, home: _RegistryHome, mounts: Sequence[Mount]) -> list[LineOf]:
    """The lines of a user's registry, read as that user."""

    def ask(_home: _RegistryHome) -> bytes:
        try:
            with (
                _open_place(kernel, home, mounts) as place,
                Fd(os.open(b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=place)) as directory,
            ):
                return read_registry(directory)
        except OSError:
            return b""

    # The user may stop the child: this marks no mount as silent, and affects only that user.
    ((_home, answer),) = ask_each((home,), ask, set(), lambda _home: home.uid, person(home.uid))
    return [LineOf(home.uid, line) for line in decode(answer or b"")]


def _open_place(kernel: Kernel, home: _RegistryHome, mounts: Sequence[Mount]) -> Fd:
    """Open the directory of a user's registry through no link except root's, as any caller. Raises  OSError"""
    return open_way(kernel, os.path.join(home.path, STATE_BELOW_HOME), mounts, (0,))
