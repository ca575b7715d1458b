"""The targets of a registry's lines now: a store, nothing yet, nothing for good, or a mount that does not answer.

A registry is written whole, under a lock, without the stores that are gone. What users' registries name is, for root,
read by a child with its user's uid, reached through no link of theirs. Root hears of a user from the accounts, and of
one whom these don't list from a folder in a store. A registry is looked for below the home that the accounts name,
since root knows no other $XDG_STATE_HOME.
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


def follow(
    kernel: Kernel, entries: Sequence[LineOf], mounts: Sequence[Mount]
) -> Iterator[tuple[LineOf, RegistryTarget]]:
    """Each line, and where it leads; looked at by a child, as a mount may never answer."""
    uid = os.geteuid()
    trusted = trusted_owners(uid)
    silent = kernel.silent
    if any(entry.uid != uid for entry in entries):
        silent = set(silent)

    def ask(entry: LineOf) -> bytes:
        return look(kernel, entry.line, mounts, trusted).value.encode()

    def where(entry: LineOf) -> Hashable:
        mount = covering(entry.line.path, mounts)
        # What one user's path leads to by a link may be silent, where others' paths are not.
        return mount if entry.uid == uid or mount in kernel.silent else (entry.uid, mount)

    for entry, answer in ask_each(entries, ask, silent, where):
        if answer is None:
            yield entry, RegistryTarget.SILENT
        else:
            yield entry, RegistryTarget(answer.decode() or RegistryTarget.ABSENT.value)


def look(kernel: Kernel, one: RegistryLine, mounts: Sequence[Mount], trusted: Container[int]) -> RegistryTarget:
    """Where a line leads. May take for ever"""
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


def open_registered(kernel: Kernel, entry: LineOf, mounts: list[Mount]) -> Store | None:
    """The store that a line names; None if it does not lead to just that one. May take for ever: ask `follow` before.

    Of another's registry it must be that user's own store, and root opens it for that user alone.
    Raises  BrokenStore, of the caller's own registry
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
    """Add a line to the caller's registry; why it does not have it now, a clause for a person, or nothing.

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
    """The registry's lock. Its holder is about to write; a stopped one is not waited for long."""
    for _glance in range(_GLANCES):
        lock = take(path, STORES + b".lock")
        if lock is not None:
            return lock
        time.sleep(_GLANCE_S)
    return None


def _still_needed(kernel: Kernel, lines: Sequence[RegistryLine], one: RegistryLine) -> list[RegistryLine]:
    """The lines that stay beside a new one; if there are too many, none that leads nowhere at the moment."""
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
    """Whether a new line says of an old one's store where it is now."""
    if one.volume != line.volume:
        return False
    known = compare(one.identity, line.identity)
    return one.store() == line.store() or (known is Likelihood.SAME and lead is not RegistryTarget.THERE)


MOST_ACCOUNTS = 10_000


_MOST_UNLISTED = 1000


_MOST_AT_ROOTS = 16

"""Names of one user's own stores in all mount points together: anybody can make directories with such names."""


_FOUND = b"found"


class _RegistryHome(NamedTuple):
    uid: int
    path: bytes


def stores_of_users(kernel: Kernel, mounts: Sequence[Mount], uids: Iterable[int] = ()) -> Iterator[LineOf]:
    """The lines of all users' registries that lead somewhere now; needs root.

    uids  of users that may be missing in the accounts' list, as a directory service need not list all
    No child is waited for beyond a few seconds: a user who keeps it from answering is passed over.
    """
    homes = _homes(kernel, uids)
    entries = [entry for home in _with_registry(kernel, homes, mounts) for entry in _entries_of(kernel, home, mounts)]
    yield from (entry for entry, lead in follow(kernel, entries, mounts) if lead is RegistryTarget.THERE)


def stores_at_roots(kernel: Kernel, points: Sequence[bytes], mounts: Sequence[Mount]) -> Iterator[LineOf]:
    """Users' own stores in some mount points, whether or not a registry has them; needs root.

    A store's own file, which nobody but its user can have put there, names its identity: it is no copy of its files.
    No child is waited for beyond a few seconds, as above.
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
    """What a user's registry would say of a store of that user's, looked at as that user; nothing if it is none."""
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
    """Where the system says that users are at home, in time: a directory service may be far away."""

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
    """Those where there seems to be a registry: most accounts have none, and cost a few calls."""

    def ask(home: _RegistryHome) -> bytes:
        try:
            with _open_place(kernel, home, mounts) as directory:
                st = os.stat(STORES, dir_fd=directory, follow_symlinks=False)
        except PermissionError:
            return _FOUND  # root of another host may not look; its user's process does
        except OSError:
            return b""
        return _FOUND if stat.S_ISREG(st.st_mode) and st.st_uid == home.uid else b""

    asked = ask_each(homes, ask, kernel.silent, lambda home: covering(home.path, mounts))
    return [home for home, answer in asked if answer == _FOUND]


def _entries_of(kernel: Kernel, home: _RegistryHome, mounts: Sequence[Mount]) -> list[LineOf]:
    """What a user's registry says, read as that user."""

    def ask(_home: _RegistryHome) -> bytes:
        try:
            with (
                _open_place(kernel, home, mounts) as place,
                Fd(os.open(b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=place)) as directory,
            ):
                return read_registry(directory)
        except OSError:
            return b""

    # A user who stops the child has not made a mount silent: what is learnt of it is that user's alone.
    ((_home, answer),) = ask_each((home,), ask, set(), lambda _home: home.uid, person(home.uid))
    return [LineOf(home.uid, line) for line in decode(answer or b"")]


def _open_place(kernel: Kernel, home: _RegistryHome, mounts: Sequence[Mount]) -> Fd:
    """The directory of a user's registry, through no link but root's, for any caller. Raises  OSError"""
    return open_way(kernel, os.path.join(home.path, STATE_BELOW_HOME), mounts, (0,))
