"""Registries of stores: finds what each line leads to now, adds lines, and reads users' registries for root.

A registry is rewritten as a whole, under a lock, without stores that are gone. For root, users' registries are read by
child processes with the users' UIDs, and users' links are not followed. Root finds users in the account database, and
through their folders in stores. Root expects a user's registry below the home directory that the account database
names, since root does not know the user's XDG_STATE_HOME.
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
from fusefs.core.identity import IdentityMatch, compare
from fusefs.core.names import Name, parse_user_store_name
from fusefs.linux.children import ask_each, user_credentials
from fusefs.linux.fd import Fd
from fusefs.linux.file_locks import take_lock
from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import Mount, covering_mount_id, read_mounts
from fusefs.linux.runtime_directories import STATE_BELOW_HOME, make_dir, persistent_dir, replace_file
from fusefs.linux.untrusted_path import open_untrusted
from fusefs.store.backing_and_mount import READABLE, BackingAndMount
from fusefs.store.layout import Store, list_users_stores, open_store, trusted_owners
from fusefs.store.mounted_paths import sides_of_fd
from fusefs.store.registry_lines import (
    MAX_BYTES,
    MAX_LINES,
    STORES,
    RegistryLine,
    decode_lines,
    encode_line,
    read_registry,
)

_MISSING = (errno.ENOENT, errno.ENOTDIR)


class RegistryTarget(Enum):
    """The target of a line.

    THERE   the store
    ABSENT  nothing now; the store may come back, for example if its disk is not mounted
    GONE    nothing, although the store's filesystem is mounted
    SILENT  a mount that does not respond
    """

    THERE = "there"
    ABSENT = "absent"
    GONE = "gone"
    SILENT = "silent"


class UserLine(NamedTuple):
    """A line of a user's registry. Root's lines are trusted; a user's line counts only for that user's own store."""

    uid: int
    line: RegistryLine


def find_targets(
    kernel: Kernel, entries: Sequence[UserLine], mounts: Sequence[Mount]
) -> Iterator[tuple[UserLine, RegistryTarget]]:
    """Yield each line with its target. Child processes check the targets, because a mount may never respond."""
    uid = os.geteuid()
    trusted = trusted_owners(uid)
    silent = kernel.silent_mounts
    if any(entry.uid != uid for entry in entries):
        silent = set(silent)

    def ask(entry: UserLine) -> bytes:
        return find_target(kernel, entry.line, mounts, trusted).value.encode()

    def where(entry: UserLine) -> Hashable:
        mount = covering_mount_id(entry.line.path, mounts)
        # A user's path may lead through a link to a silent mount, while other users' paths don't.
        return mount if entry.uid == uid or mount in kernel.silent_mounts else (entry.uid, mount)

    for entry, answer in ask_each(entries, ask, silent, where):
        if answer is None:
            yield entry, RegistryTarget.SILENT
        else:
            yield entry, RegistryTarget(answer.decode() or RegistryTarget.ABSENT.value)


def find_target(kernel: Kernel, line: RegistryLine, mounts: Sequence[Mount], trusted: Container[int]) -> RegistryTarget:
    """Find the target of a line. This may block forever."""
    try:
        base = open_untrusted(kernel, line.path, mounts, trusted)
    except OSError as error:
        missing = error.errno in _MISSING and _was_here(kernel, line, mounts, trusted)
        return RegistryTarget.GONE if missing else RegistryTarget.ABSENT
    with base:
        try:
            with kernel.open_beneath(base, line.name, READABLE) as fd:
                likelihood = compare(kernel.identify(fd), line.identity)
        except OSError as error:
            if error.errno not in _MISSING:
                return RegistryTarget.ABSENT
            likelihood = IdentityMatch.OTHER
        if likelihood is not IdentityMatch.OTHER:
            return RegistryTarget.THERE
        return RegistryTarget.GONE if _is_on(base, line) else RegistryTarget.ABSENT


def _was_here(kernel: Kernel, line: RegistryLine, mounts: Sequence[Mount], trusted: Container[int]) -> bool:
    """Return whether the lowest existing directory of a line's path is on the filesystem on which the store was."""
    path = line.path
    while path != b"/":
        path = os.path.dirname(path)
        try:
            with open_untrusted(kernel, path, mounts, trusted) as fd:
                return _is_on(fd, line)
        except OSError as error:
            if error.errno not in _MISSING:
                return False
    return False


def _is_on(fd: Fd, line: RegistryLine) -> bool:
    return line.filesystem != 0 and os.fstatvfs(fd).f_fsid & (1 << 64) - 1 == line.filesystem


def open_registered(kernel: Kernel, entry: UserLine, mounts: list[Mount]) -> Store | None:
    """Open the store that a line names; return None if the line leads to another store or to none.

    This may block forever, so call `find_targets` first. If the line is from another user's registry, the store must be
    that user's own, and root opens it for that user only.
    Raises  BrokenStore if the line is from the caller's own registry
    """
    line, of = entry.line, None if entry.uid == os.geteuid() else entry.uid
    try:
        base = open_untrusted(kernel, line.path, mounts, trusted_owners(os.geteuid()))
        shown = sides_of_fd(kernel, base, mounts)
        store = open_store(kernel, shown, line.path, line.name, of=of)
    except (OSError, TrashdError) as error:
        if isinstance(error, BrokenStore) and of is None:
            raise
        return None
    if store is None:
        return None
    with ExitStack() as owned:
        owned.enter_context(store)
        if store.volume.id != line.volume or compare(kernel.identify(store.fd), line.identity) is IdentityMatch.OTHER:
            return None
        owned.pop_all()
    return store._replace(is_named=True)


_MODE = 0o600


_N_LOCK_TRIES, _LOCK_PAUSE_S = 50, 0.01


def add_line(kernel: Kernel, new_line: RegistryLine) -> str:
    """Add a line to the caller's registry. Return the reason if that failed, as a clause for messages, or "".

    Raises  OSError
    """
    path = make_dir(persistent_dir())
    lock = _lock_registry(path)
    if lock is None:
        return "another process holds the registry's lock"
    with lock, Fd(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as directory:
        try:
            lines = decode_lines(read_registry(directory))
        except FileNotFoundError:
            lines = []
        kept = [*_still_needed(kernel, lines, new_line), new_line]
        text = b"".join(map(encode_line, kept))
        if len(text) > MAX_BYTES or len(kept) > MAX_LINES:
            return "the registry is full of stores that still exist"
        replace_file(os.path.join(path, STORES), text, _MODE, is_durable=True)
        os.fsync(directory)
    return ""


def _lock_registry(path: bytes) -> Fd | None:
    """Take the registry's lock. Return None if its holder, which may have been stopped, keeps it for too long."""
    for _glance in range(_N_LOCK_TRIES):
        lock = take_lock(path, STORES + b".lock")
        if lock is not None:
            return lock
        time.sleep(_LOCK_PAUSE_S)
    return None


def _still_needed(kernel: Kernel, lines: Sequence[RegistryLine], new_line: RegistryLine) -> list[RegistryLine]:
    """Return the lines to keep along with a new one. If there are too many, omit lines whose store is absent now."""
    entries = [UserLine(os.geteuid(), line) for line in lines]
    followed = [(entry.line, lead) for entry, lead in find_targets(kernel, entries, read_mounts())]
    kept = [
        (line, lead)
        for line, lead in followed
        if lead is not RegistryTarget.GONE and not _replaces(new_line, line, lead)
    ]
    n_bytes = sum(len(encode_line(line)) for line, _lead in kept) + len(encode_line(new_line))
    if len(kept) >= MAX_LINES or n_bytes > MAX_BYTES:
        kept = [(line, lead) for line, lead in kept if lead is not RegistryTarget.ABSENT]
    return [line for line, _lead in kept]


def _replaces(new_line: RegistryLine, line: RegistryLine, target: RegistryTarget) -> bool:
    """Return whether a new line replaces an old one: it has the same path, or it is the same store with a new path."""
    if new_line.volume != line.volume:
        return False
    likelihood = compare(new_line.identity, line.identity)
    return new_line.store() == line.store() or (likelihood is IdentityMatch.SAME and target is not RegistryTarget.THERE)


MOST_ACCOUNTS = 10_000


_MOST_UNLISTED = 1000


_MOST_AT_ROOTS = 16
"""The most stores of one user at all mount points together, because any user can make directories with such names."""
_HAS_REGISTRY = b"found"


class _RegistryHome(NamedTuple):
    uid: int
    path: bytes


def stores_of_users(kernel: Kernel, mounts: Sequence[Mount], uids: Iterable[int] = ()) -> Iterator[UserLine]:
    """Find the lines of all users' registries that lead to a store now; needs root.

    If a child does not respond within a few seconds, since its user stopped it or a mount hangs, its lines are skipped.
    uids  users who may be missing from the list of accounts, since a directory service need not list all
    """
    homes = _homes(kernel, uids)
    entries = [entry for home in _with_registry(kernel, homes, mounts) for entry in _entries_of(kernel, home, mounts)]
    yield from (entry for entry, lead in find_targets(kernel, entries, mounts) if lead is RegistryTarget.THERE)


def stores_at_roots(kernel: Kernel, points: Sequence[bytes], mounts: Sequence[Mount]) -> Iterator[UserLine]:
    """Find users' own stores at mount points, whether or not they are in a registry; needs root.

    Such a store is not a copy: its volume.json, which only its user can have put there, contains the store's identity.
    If a child does not respond within a few seconds, its stores are skipped.
    """

    def ask(point: bytes) -> bytes:
        try:
            with open_untrusted(kernel, point, mounts, (0,)) as base:
                return b"\0".join(list_users_stores(kernel, base))
        except OSError:
            return b""

    n_of: Counter[int] = Counter()
    for point, answer in ask_each(points, ask, kernel.silent_mounts, lambda point: covering_mount_id(point, mounts)):
        for name in filter(None, (answer or b"").split(b"\0")):
            uid = parse_user_store_name(name)
            if uid is None:
                continue
            n_of[uid] += 1
            if n_of[uid] <= _MOST_AT_ROOTS:
                yield from _line_at_root(kernel, uid, os.path.join(point, name), mounts)


def _line_at_root(kernel: Kernel, uid: int, path: bytes, mounts: Sequence[Mount]) -> Iterator[UserLine]:
    """Yield the registry line for a user's own store, or nothing for other stores. A process of that user makes it."""
    base_path, name = os.path.split(path)

    def ask(_path: bytes) -> bytes:
        try:
            base = BackingAndMount(open_untrusted(kernel, base_path, mounts, trusted_owners(uid)))
            store = open_store(kernel, base, base_path, Name(name))
            if store is None:
                return b""
            with store:
                identity = kernel.identify(store.fd)
                if store.volume.store is None or compare(identity, store.volume.store) is IdentityMatch.OTHER:
                    return b""
                filesystem = os.fstatvfs(store.fd).f_fsid & (1 << 64) - 1
                return encode_line(RegistryLine(identity, store.volume.id, filesystem, base_path, store.name))
        except (OSError, TrashdError):
            return b""

    ((_path, answer),) = ask_each((path,), ask, set(), lambda _path: uid, user_credentials(uid))
    yield from (UserLine(uid, line) for line in decode_lines(answer or b"") if line.store() == path)


def _homes(kernel: Kernel, uids: Iterable[int]) -> list[_RegistryHome]:
    """Read users' home directories from the account database, within a time limit: a directory service may be slow."""

    def ask(uid: int | None) -> bytes:
        with suppress(KeyError):
            accounts = islice(pwd.getpwall(), MOST_ACCOUNTS) if uid is None else (pwd.getpwuid(uid),)
            return b"\0".join(b"%d:%s" % (one.pw_uid, os.fsencode(one.pw_dir)) for one in accounts)
        return b""

    def homes_of(requested: Sequence[int | None]) -> dict[int, bytes]:
        answers = (
            answer or b"" for _uid, answer in ask_each(requested, ask, kernel.silent_mounts, lambda _uid: pwd.__name__)
        )
        pairs = (one.partition(b":") for answer in answers for one in answer.split(b"\0") if one)
        return {int(uid): path for uid, _colon, path in pairs}

    homes = homes_of((None,))
    homes |= homes_of([*islice((uid for uid in sorted(uids) if uid not in homes), _MOST_UNLISTED)])
    return [_RegistryHome(uid, path) for uid, path in homes.items() if uid != 0 and path.startswith(b"/")]


def _with_registry(kernel: Kernel, homes: Sequence[_RegistryHome], mounts: Sequence[Mount]) -> list[_RegistryHome]:
    """Find the home directories that seem to have a registry; for most, a few calls show that they have none."""

    def ask(home: _RegistryHome) -> bytes:
        try:
            with _open_registry_directory(kernel, home, mounts) as directory:
                st = os.stat(STORES, dir_fd=directory, follow_symlinks=False)
        except PermissionError:
            return _HAS_REGISTRY  # the server may refuse this to root, but not to a process of its user
        except OSError:
            return b""
        return _HAS_REGISTRY if stat.S_ISREG(st.st_mode) and st.st_uid == home.uid else b""

    answers = ask_each(homes, ask, kernel.silent_mounts, lambda home: covering_mount_id(home.path, mounts))
    return [home for home, answer in answers if answer == _HAS_REGISTRY]


def _entries_of(kernel: Kernel, home: _RegistryHome, mounts: Sequence[Mount]) -> list[UserLine]:
    """Read the lines of a user's registry, as that user."""

    def ask(_home: _RegistryHome) -> bytes:
        try:
            with (
                _open_registry_directory(kernel, home, mounts) as place,
                Fd(os.open(b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=place)) as directory,
            ):
                return read_registry(directory)
        except OSError:
            return b""

    # The user may stop the child. That must affect only that user, so this must not mark a mount as silent.
    ((_home, answer),) = ask_each((home,), ask, set(), lambda _home: home.uid, user_credentials(home.uid))
    return [UserLine(home.uid, line) for line in decode_lines(answer or b"")]


def _open_registry_directory(kernel: Kernel, home: _RegistryHome, mounts: Sequence[Mount]) -> Fd:
    """Open the directory of a user's registry; even for that user, follow only root's links. Raises  OSError"""
    return open_untrusted(kernel, os.path.join(home.path, STATE_BELOW_HOME), mounts, (0,))
