"""Making a store, proving what its filesystem can do, and repairing what somebody planted there."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple

from fusefs.core.errors import NoStore, Untrusted
from fusefs.core.names import STORE, Name, VolumeId, printable
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.private import is_nameless
from fusefs.linux.unnamed import keeps_unnamed
from fusefs.store.folders import whose
from fusefs.store.layout import (
    CACHEDIR_TAG,
    CACHEDIR_TEXT,
    COPY_PREFIX,
    NEW_PREFIX,
    USERS,
    VOLUME,
    VOLUME_MAX_BYTES,
    Store,
    Volume,
    decode_volume,
    drop_acls,
    encode_volume,
    is_regular,
    open_store,
    read_volume,
)
from fusefs.store.new_folder import discard_dead
from fusefs.store.sides import READABLE, Sides
from fusefs.store.visible import NO_EXCHANGE

_PROBE = (Name(b"probe-a"), Name(b"probe-b"))
_PROBE_UNNAMED = Name(b"probe-unnamed")
_ATTEMPTS = 8
_PLANTED = b".planted-"
_KEPT_OF_NAME = 200


class Initialised(NamedTuple):
    """What `trashd init` did: the store's path, whether it was made now, and what was repaired."""

    path: bytes
    volume: Volume
    made: bool
    repaired: tuple[str, ...]


def make_store(kernel: Kernel, base_fd: Fd, base_path: bytes, mounted: Fd | None = None) -> Store:
    """A new store in a directory, or the one that somebody else made meanwhile; takes over the fds.

    It is built under another name and appears complete by one rename: there is no store without a volume.json.
    Raises  OSError from making it; Untrusted if the name is taken by something that is no store of ours
    """
    with ExitStack() as owned:
        owned.enter_context(base_fd)
        if mounted is not None:
            owned.enter_context(mounted)
        for attempt in range(_ATTEMPTS):
            try:
                _build(kernel, Sides(base_fd, mounted), Name(NEW_PREFIX + os.urandom(6).hex().encode()))
                break
            except FileNotFoundError:
                # An init may take it for an abandoned one in the moment before it is locked: start again.
                if attempt == _ATTEMPTS - 1:
                    raise
        owned.pop_all()
    store = open_store(kernel, base_fd, base_path, mounted)
    if store is None:
        raise Untrusted(base_path)
    return store


def _build(kernel: Kernel, base: Sides, new: Name) -> None:
    """A store under another name, then renamed. Raises  as `unfinished`"""
    with unfinished(kernel, base, new), suppress(FileExistsError):
        kernel.rename_free(base.names(), new, base.names(), STORE)
        _sync_dir(kernel, base.fd)


@contextmanager
def unfinished(kernel: Kernel, base: Sides, new: Name | None = None) -> Iterator[Fd]:
    """A whole store under a name that nobody looks for, locked; gone again unless the block gives it another one.

    Raises  OSError; FileNotFoundError if an init was faster than the lock
    """
    new = new or Name(NEW_PREFIX + os.urandom(6).hex().encode())
    kernel.mkdir(base.fd, new)
    try:
        with kernel.open_dir(base.fd, new) as fd:
            if kernel.is_local(fd) and not kernel.lock(fd):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), new)
            _fill(kernel, fd)
            yield fd
    finally:
        discard_unfinished(kernel, base, new)


def discard_abandoned(kernel: Kernel, base: Sides, prefix: bytes = NEW_PREFIX) -> list[str]:
    """Remove what killed makers of ours left; whose maker lives is locked, or may be on another host."""
    told = []
    with suppress(PermissionError), kernel.open_dir(base.fd) as readable:
        for name in kernel.list(readable):
            if not name.startswith(prefix) or _owner_of(kernel, base.fd, name) != os.geteuid():
                continue
            with suppress(FileNotFoundError), kernel.open_dir(base.fd, name) as fd:
                if kernel.is_local(fd) and kernel.lock(fd):
                    if name.startswith(COPY_PREFIX) and not _is_emptied(kernel, fd):
                        continue
                    discard_unfinished(kernel, base, Name(name))
                    told.append(f"removed {name.decode()}, which was never finished")
    return told


def _is_emptied(kernel: Kernel, fd: Fd) -> bool:
    """Whether a directory is empty when what a killed maker leaves in his is gone from it.

    Whoever owns the one above can give its name to any directory of ours there: nothing but that is removed.
    """
    st = kernel.fstat(fd)
    if st.st_uid != os.geteuid() or st.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        return False
    for name in kernel.list(fd):
        remove = kernel.unlink if is_nameless(name) else kernel.rmdir
        with suppress(OSError):
            remove(fd, name)
    return kernel.is_empty(fd)


def _owner_of(kernel: Kernel, dir_fd: Fd, name: bytes) -> int | None:
    """Whose a name is; None where something is mounted, or nothing is left."""
    try:
        return kernel.stat(dir_fd, name).st_uid
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EXDEV):
            raise
        return None


def _fill(kernel: Kernel, fd: Fd) -> None:
    _own(kernel, fd, 0o755)
    kernel.mkdir(fd, USERS)
    with kernel.open_dir(fd, USERS) as users:
        _own(kernel, users, 0o1777)
    volume = _prove(kernel, fd, VolumeId(os.urandom(16).hex()))
    _write_new(kernel, fd, CACHEDIR_TAG, CACHEDIR_TEXT)
    _write_new(kernel, fd, VOLUME, encode_volume(volume))
    kernel.fsync(fd)


def _own(kernel: Kernel, fd: Fd, mode: int) -> None:
    """Ours, that mode, and no ACL: what a parent's default ACL would have given to others is taken back."""
    drop_acls(kernel, fd)
    kernel.chown(fd, os.geteuid(), os.getegid())
    kernel.chmod(fd, mode)


def _write_new(kernel: Kernel, dir_fd: Fd, name: Name, content: bytes) -> None:
    temporary = Name(name + b".new")
    with suppress(FileNotFoundError):
        kernel.unlink(dir_fd, temporary)
    with kernel.create(dir_fd, temporary) as fd:
        kernel.write(fd, content)
        kernel.chmod(fd, 0o644)
        kernel.fsync(fd)
    kernel.rename(dir_fd, temporary, dir_fd, name)


def _sync_dir(kernel: Kernel, fd: Fd) -> None:
    with kernel.open_dir(fd) as readable:
        kernel.fsync(readable)


def discard_unfinished(kernel: Kernel, base: Sides, name: Name) -> None:
    """Remove what a killed `make_store` left; a store that was finished has no such name."""
    try:
        fd = kernel.open_dir(base.fd, name)
    except OSError:
        return
    with fd:
        for pair in _PROBE:
            _discard_dir(kernel, fd, pair)
        for entry in (VOLUME, CACHEDIR_TAG, _PROBE_UNNAMED, Name(VOLUME + b".new"), Name(CACHEDIR_TAG + b".new")):
            with suppress(FileNotFoundError):
                kernel.unlink(fd, entry)
        _discard_dir(kernel, fd, USERS)
    kernel.rmdir(base.names(), name)


def _discard_dir(kernel: Kernel, parent: Fd, name: Name) -> None:
    """Remove a directory of ours with at most the probe's marks in it."""
    try:
        fd = kernel.open_dir(parent, name)
    except FileNotFoundError:
        return
    with fd:
        for mark in kernel.list(fd):
            if mark in _PROBE:
                kernel.rmdir(fd, mark)
    kernel.rmdir(parent, name)


def _prove(kernel: Kernel, fd: Fd, identifier: VolumeId) -> Volume:
    """What volume.json is to say: what was seen to work in an opened `.trashd`."""
    exchanges, lasts = probe_exchange(kernel, fd), keeps_unnamed(kernel, fd, _PROBE_UNNAMED)
    return Volume(identifier, exchanges, kernel.filesystem(fd), lasts)


def probe_exchange(kernel: Kernel, dir_fd: Fd) -> bool:
    """Whether RENAME_EXCHANGE really exchanges here, tried on a throw-away pair.

    Each of the two holds a directory of its own name: a filesystem that ignores the flag can't replace them
    (ENOTEMPTY), and one that does nothing, or something else, and says 0, shows by where the marks are. After a
    0 the kernel has exchanged its own dentries, so that looking by name may show what the liar did not do: the
    directory's listing, which comes from the filesystem, decides too.
    Source  pitfalls 1 and 2; measured with a FUSE filesystem that says 0 and does nothing
    """
    a, b = _PROBE
    try:
        for name in _PROBE:
            kernel.mkdir(dir_fd, name)
            with kernel.open_dir(dir_fd, name) as fd:
                kernel.mkdir(fd, name)
        before = kernel.list_inos(dir_fd)
        try:
            kernel.exchange(dir_fd, a, dir_fd, b)
        except OSError as error:
            if error.errno in NO_EXCHANGE:
                return False
            raise
        after = kernel.list_inos(dir_fd)
        listed = (after.get(a), after.get(b)) == (before.get(b), before.get(a))
        return listed and _marks(kernel, dir_fd, a) == [b] and _marks(kernel, dir_fd, b) == [a]
    finally:
        for name in _PROBE:
            _discard_dir(kernel, dir_fd, name)


def _marks(kernel: Kernel, dir_fd: Fd, name: Name) -> list[bytes]:
    try:
        with kernel.open_dir(dir_fd, name) as fd:
            return kernel.list(fd)
    except FileNotFoundError:
        return []


def initialise(kernel: Kernel, base_fd: Fd, base_path: bytes, mounted: Fd | None = None) -> tuple[Store, Initialised]:
    """Make the store of a directory, or check and repair the one that is there; takes over the fds.

    Root takes over what a user planted or made before: the directories and volume.json become root's, lose
    their ACLs, and keep what is in them, since a user's orphans lie in his own folder whoever owns the rest.
    Raises  NoStore if `.trashd` is something else than a directory
    """
    with ExitStack() as owned:
        base = owned.enter_context(Sides(base_fd, mounted))
        repaired = discard_abandoned(kernel, base)
        try:
            fd = kernel.open_beneath(base_fd, STORE, READABLE)
        except FileNotFoundError:
            owned.pop_all()
            store = make_store(kernel, base_fd, base_path, mounted)
            return store, Initialised(os.path.join(base_path, STORE), store.volume, True, tuple(repaired))
        except OSError as error:
            where = os.path.join(base_path, STORE)
            raise NoStore(where, "it is not a directory of this filesystem; move it away") from error
        with fd:
            old = _read_anyones(kernel, fd)
            if os.geteuid() == 0:
                repaired += _take_over(kernel, fd)
            repaired += _renew_volume(kernel, fd, base_path, old)
        owned.pop_all()
    store_or_none = open_store(kernel, base_fd, base_path, mounted)
    if store_or_none is None:
        raise Untrusted(os.path.join(base_path, STORE))
    discard_dead(kernel, store_or_none.u_fd, os.geteuid() or None)
    done = Initialised(os.path.join(base_path, STORE), store_or_none.volume, False, tuple(repaired))
    return store_or_none, done


def _take_over(kernel: Kernel, fd: Fd) -> list[str]:
    """Make `.trashd`, `u` and volume.json root's, and move planted user folders to their owners' names."""
    repaired = []
    if _is_wrong(kernel, fd, 0o755):
        _own(kernel, fd, 0o755)
        repaired.append("took over .trashd")
    _make_way(kernel, fd, repaired)
    with kernel.open_beneath(fd, USERS, READABLE) as users:
        if _is_wrong(kernel, users, 0o1777):
            _own(kernel, users, 0o1777)
            repaired.append("took over .trashd/u")
        for name in kernel.list(users):
            if _owner_of(kernel, users, name) is None:
                continue  # its user mounted something there; the kernel would not let us move it either
            st = kernel.stat(users, name)
            planted = (
                name.isdigit()
                and whose(name) is not None
                and (not stat.S_ISDIR(st.st_mode) or name != str(st.st_uid).encode())
            )
            if planted:
                kind = b"" if stat.S_ISDIR(st.st_mode) else b".planted"
                aside = str(st.st_uid).encode() + b"." + os.urandom(6).hex().encode() + kind
                kernel.rename_free(users, name, users, aside)
                repaired.append(f"moved u/{name.decode()}, which belongs to uid {st.st_uid}, to u/{aside.decode()}")
    return repaired


def _make_way(kernel: Kernel, fd: Fd, repaired: list[str]) -> None:
    """See to it that `u` is a directory and that all else is files of root's, so that nothing is in our way."""
    for name in kernel.list(fd):
        st = kernel.stat(fd, name)
        is_right = stat.S_ISDIR(st.st_mode) if name == USERS else _is_roots_file(st)
        if not is_right and _PLANTED not in name:
            aside = name[:_KEPT_OF_NAME] + _PLANTED + os.urandom(6).hex().encode()
            kernel.rename_free(fd, name, fd, aside)
            repaired.append(f"moved {printable(name)} to {printable(aside)}")
    with suppress(FileExistsError):
        kernel.mkdir(fd, USERS)
        with kernel.open_dir(fd, USERS) as users:
            _own(kernel, users, 0o1777)


def _is_roots_file(st: os.stat_result) -> bool:
    return stat.S_ISREG(st.st_mode) and st.st_uid == 0 and st.st_nlink == 1


def _is_wrong(kernel: Kernel, fd: Fd, mode: int) -> bool:
    st = kernel.fstat(fd)
    acl = any(name.startswith("system.posix_acl_") for name in kernel.xattrs(fd))
    return st.st_uid != os.geteuid() or stat.S_IMODE(st.st_mode) != mode or acl


def _read_anyones(kernel: Kernel, fd: Fd) -> Volume | None:
    """volume.json whoever wrote it: its id is worth keeping, as the records of this store name it."""
    try:
        with kernel.open_beneath(fd, VOLUME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as file:
            return decode_volume(kernel.read(file, VOLUME_MAX_BYTES)) if is_regular(kernel, file) else None
    except OSError:
        return None


def _renew_volume(kernel: Kernel, fd: Fd, base_path: bytes, old: Volume | None) -> list[str]:
    """Write volume.json where it is missing, untrusted or not understood, and probe again on another filesystem."""
    try:
        known = read_volume(kernel, fd, base_path)
        if known.filesystem == kernel.filesystem(fd) and known.unnamed is not None:
            return []
    except (FileNotFoundError, Untrusted):
        pass
    identifier = old.id if old else VolumeId(os.urandom(16).hex())
    volume = _prove(kernel, fd, identifier)
    _write_new(kernel, fd, VOLUME, encode_volume(volume))
    kernel.fsync(fd)
    return ["wrote volume.json"]
