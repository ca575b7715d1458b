"""A cache of a backing filesystem's metadata: attributes, extended attributes, names, link targets, listings.

Pure: the caller passes the results of its lookups, and the time. The cache may forget anything at any time. It never
returns an expired fact, one that has changed since it was read, or half a listing.

A lookup on a slow filesystem takes time, and its result may be as old as the start of the lookup. So changes are
numbered. A lookup begins with the number of the newest change (its epoch), and its result is refused if the object has
changed since then. The number of each change is kept while any lookup is in progress.

Extended attributes are cached because `ls -l`, `cp -p` and `rsync -A` read ACLs, `ls --color` reads capabilities, and
`rsync -X` reads all names. The kernel itself reads them before it grants access, runs a program or writes.
"""

from __future__ import annotations

import enum
import errno
import stat
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from struct import Struct, error
from sys import getsizeof
from typing import Final, NamedTuple, NewType

_S_IFMT = 0o170000


class Attributes(NamedTuple):
    """The fields of statx(2); btime_ns is 0 if the filesystem records no birth times."""

    dev: int
    ino: int
    mode: int
    nlink: int
    uid: int
    gid: int
    rdev: int
    size: int
    blocks: int
    blksize: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    btime_ns: int

    def gives_rights(self) -> bool:
        """Whether the inode is a setuid or setgid program."""
        is_set = self.mode & stat.S_ISUID or (self.mode & stat.S_ISGID and self.mode & stat.S_IXGRP)
        return bool(is_set) and self.mode & _S_IFMT == stat.S_IFREG

    def is_directory(self) -> bool:
        return self.mode & _S_IFMT == stat.S_IFDIR


ACCESS_ACL, DEFAULT_ACL = b"system.posix_acl_access", b"system.posix_acl_default"
ACLS: Final = frozenset({ACCESS_ACL, DEFAULT_ACL})
CAPABILITY, LABEL = b"security.capability", b"security.selinux"
NAMES: Final = b""
"""Stands for the list of all names; its value contains the names, each followed by a NUL, as from listxattr(2)."""
Answers = Mapping[bytes, bytes | int]
"""The result for each name: the value, or an errno."""
UNSUPPORTED: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS})
"""After one of these errors, other files need not be tried."""
_ABSENT: Final = UNSUPPORTED | {errno.ENODATA}
"""Errors after which the attribute counts as missing; any other error may be temporary."""
CACHED_XATTRS: Final = (NAMES, ACCESS_ACL, DEFAULT_ACL, CAPABILITY, LABEL)
"""The attributes that are cached, with the same numbers as in mount/native/prefetch.c."""
_NUMBERS: Final = {name: number for number, name in enumerate(CACHED_XATTRS)}
_LONGEST_BYTES = 4096
_PACKED_XATTR = Struct("=IBi")
"""The UID that got the result, the number of the name, and the size of the value that follows, or a negative errno."""
UserAnswers = dict[tuple[int, bytes], bytes | int]
"""Results by UID and name; UID 0: every user would get the same result, or it is root's."""


def is_cached_xattr(name: bytes) -> bool:
    """Whether this extended attribute is one that is cached. Some of the others change by themselves."""
    return name in _NUMBERS


def pack_xattrs(answers: UserAnswers) -> bytes:
    """Encode the results for attributes that are cached, except temporary errors and long values.

    A program's capabilities are not cached: they are read each time the program is run.
    ENOSYS becomes EOPNOTSUPP, because the kernel's FUSE would apply ENOSYS to all files.
    """
    parts = []
    for (uid, name), answer in answers.items():
        if name not in _NUMBERS:
            continue
        if isinstance(answer, int):
            if answer in _ABSENT:
                number = errno.EOPNOTSUPP if answer in UNSUPPORTED else answer
                parts.append(_PACKED_XATTR.pack(uid, _NUMBERS[name], -number))
        elif name != CAPABILITY and len(answer) <= _LONGEST_BYTES:
            parts.append(_PACKED_XATTR.pack(uid, _NUMBERS[name], len(answer)) + answer)
    return b"".join(parts)


def unpack_xattrs(packed: bytes, at: int = 0) -> UserAnswers:
    answers: UserAnswers = {}
    while at < len(packed):
        uid, number, size = _PACKED_XATTR.unpack_from(packed, at)
        at += _PACKED_XATTR.size
        if size < 0:
            answers[uid, CACHED_XATTRS[number]] = -size
        else:
            answers[uid, CACHED_XATTRS[number]] = packed[at : at + size]
            at += size
    return answers


NodeId = NewType("NodeId", int)
"""The kernel's number for a node: the backing inode's number, unless another live node has that number."""
SourceKey = tuple[int, bytes] | tuple[int, int, int]
"""One incarnation of one backing inode: (device, file handle) if handles exist, else (device, ino, birth time)."""
ROOT = NodeId(1)
TOP = NodeId(1 << 62)
"""A second ID of the root, used if the kernel has another inode number for it: see mount/life/root_inode.py."""
ROOTS = (ROOT, TOP)


def source_key(attributes: Attributes, handle: bytes) -> SourceKey:
    """Identify one incarnation of an inode by its file handle or, if handles are not supported, by its birth time."""
    return (attributes.dev, handle) if handle else (attributes.dev, attributes.ino, attributes.btime_ns)


class NodeZone(enum.IntEnum):
    """The place of a node: outside trash stores; a store or inside one; in a tree that a reaper is deleting."""

    OUTSIDE = 0
    STORE = 1
    TRASH = 2


Dirent = tuple[bytes, int, int, int]
"""Name, inode number, offset of the next entry, and type (DT_DIR etc.; DT_UNKNOWN if the filesystem reports none)."""


class PackedEntries:
    """The entries of a directory, in order. Entries can be appended until the object is stored in a cache."""

    __slots__ = ("_following", "_inos", "_kinds", "_names", "_starts")

    def __init__(self, entries: Iterable[Dirent] = ()) -> None:
        self._names = bytearray()
        self._starts = array("Q", (0,))
        self._inos = array("Q")
        self._following = array("q")
        self._kinds = bytearray()
        self.extend(entries)

    def extend(self, entries: Iterable[Dirent]) -> None:
        columns = tuple(zip(*entries, strict=True))
        if not columns:
            return
        names, inos, following, kinds = columns
        self._starts.extend(accumulate(map(len, names[1:]), initial=len(self._names) + len(names[0])))
        self._names += b"".join(names)
        self._inos.extend(inos)
        self._following.extend(following)
        self._kinds += bytes(kinds)

    def __len__(self) -> int:
        return len(self._inos)

    def __getitem__(self, index: int) -> Dirent:
        name = bytes(self._names[self._starts[index] : self._starts[index + 1]])
        return name, self._inos[index], self._following[index], self._kinds[index]

    def after(self, offset: int) -> int | None:
        """Return the index of the entry that follows the one with this next offset, or None if no entry has it."""
        try:
            return self._following.index(offset) + 1
        except ValueError:
            return None

    def __iter__(self) -> Iterator[Dirent]:
        return map(self.__getitem__, range(len(self)))

    @property
    def n_bytes(self) -> int:
        columns = (self._names, self._starts, self._inos, self._following, self._kinds)
        return getsizeof(self) + sum(map(getsizeof, columns))


Epoch = NewType("Epoch", int)
"""The number of the newest change when a lookup began."""
_PACKED = Struct("=QQIIIIQQQIqqqqd")
"""Attributes, and the time at which they expire, in a fifth of the memory that a tuple of numbers would use."""
_N_FIELDS = len(Attributes._fields)
_UNTIL = Struct("=d")
"""The expiry time that precedes packed extended attributes."""
_Changed = SourceKey | tuple[SourceKey, bytes | None]
"""What changed: an inode's attributes, one name in a directory, its listing, or all its names (None)."""
_MOST_NOTES = 4096
_MOST_XATTRS = 32
"""The most results that are kept for one inode: if each user gets a different result, there may be many."""
_LISTING = b""
"""Stands for the whole listing in place of a name. The listing changes when any name changes."""
_LARGEST_SHARE = 4
"""One directory may use the cache's size divided by this. A larger one would evict all else, then parts of itself."""


def _allocated(size_bytes: int) -> int:
    """Return the memory that an object of this size uses: the allocator works in steps of 16 bytes."""
    return -(-size_bytes // 16) * 16


_BYTES_BYTES = getsizeof(b"") + 7  # the average padding to a multiple of 16 bytes
_TUPLE_BYTES = _allocated(getsizeof((None, None)))
_NUMBER_BYTES = _allocated(getsizeof(1 << 59))  # int and float
_HANDLE_BYTES = _TUPLE_BYTES + _NUMBER_BYTES + _BYTES_BYTES
_BIRTH_BYTES = _allocated(getsizeof((None, None, None))) + 3 * _NUMBER_BYTES
_UNTIL_BYTES = _TUPLE_BYTES + _NUMBER_BYTES
_LISTING_BYTES = _allocated(getsizeof((None, None, None))) + 2 * _NUMBER_BYTES


def _source_bytes(source: SourceKey) -> int:
    handle = source[1]
    return _HANDLE_BYTES + len(handle) if isinstance(handle, bytes) else _BIRTH_BYTES


def _name_bytes(name: bytes, source: SourceKey | None) -> int:
    return _UNTIL_BYTES + _BYTES_BYTES + len(name) + (0 if source is None else _source_bytes(source))


class _NamesOfDirectory:
    """The names of one directory, each with its inode (None: no such name) and the time at which the fact expires."""

    __slots__ = ("entries", "n_bytes")

    def __init__(self) -> None:
        self.entries: dict[bytes, tuple[SourceKey | None, float]] = {}
        self.n_bytes = _NAMES_BYTES

    def put(self, name: bytes, source: SourceKey | None, until_s: float) -> None:
        entries = self.entries
        before = entries.get(name)
        if before is None:
            table_bytes = getsizeof(entries)
            entries[name] = (source, until_s)
            self.n_bytes += getsizeof(entries) - table_bytes + _name_bytes(name, source)
        elif before[1] <= until_s:
            entries[name] = (source, until_s)
            if before[0] != source:
                self.n_bytes += _name_bytes(name, source) - _name_bytes(name, before[0])

    def drop(self, name: bytes) -> None:
        before = self.entries.pop(name, None)
        if not self.entries:  # a dict keeps its capacity even when all entries are removed one by one
            self.entries = {}
            self.n_bytes = _NAMES_BYTES
        elif before is not None:
            self.n_bytes -= _name_bytes(name, before[0])


_NAMES_BYTES = _allocated(getsizeof(object.__new__(_NamesOfDirectory))) + _NUMBER_BYTES + getsizeof({})


class _CachedInode:
    __slots__ = ("listing", "names", "packed", "target", "xattrs")

    def __init__(self) -> None:
        self.packed: bytes | None = None
        self.target: tuple[bytes, float] | None = None
        self.xattrs: bytes | None = None
        self.names: _NamesOfDirectory | None = None
        self.listing: tuple[PackedEntries, float, int] | None = None  # entries, expiry, and their counted bytes

    def extra_bytes(self) -> int:
        """Return the memory for the facts that not every inode has."""
        return (
            (0 if self.target is None else _UNTIL_BYTES + _BYTES_BYTES + len(self.target[0]))
            + (0 if self.xattrs is None else _BYTES_BYTES + len(self.xattrs))
            + (0 if self.names is None else self.names.n_bytes)
            + (0 if self.listing is None else self.listing[2])
        )


_ITEM_BYTES = _allocated(getsizeof(_CachedInode())) + _allocated(getsizeof(bytes(_PACKED.size)))


class MetadataCache:
    """A cache of limited size. It evicts the least recently used inodes; a directory is evicted with all its names."""

    __slots__ = (
        "_changed_at", "_floor", "_items", "_lifetime_s", "_limit_bytes", "_n_bytes", "_n_lookups", "epoch",
        "largest_bytes",
    )  # fmt: skip

    def __init__(self, limit_bytes: int, lifetime_s: float) -> None:
        """Create an empty cache.

        limit_bytes  limit on the memory used; 0: nothing is cached, but changes are recorded
        lifetime_s   how long a fact stays valid after it is read
        """
        self.epoch = Epoch(0)
        """The number of the newest change. Callers that store their results at once use it without begin_lookup."""
        self._limit_bytes = limit_bytes
        self.largest_bytes = limit_bytes // _LARGEST_SHARE
        """The size of the largest listing that is cached; callers need not collect a larger one."""
        self._lifetime_s = lifetime_s
        self._items: OrderedDict[SourceKey, _CachedInode] = OrderedDict()
        self._n_bytes = 0
        self._n_lookups = 0
        self._changed_at: dict[_Changed, Epoch] = {}
        self._floor = self.epoch  # results of lookups that began earlier are refused, as changes are forgotten

    def __len__(self) -> int:
        """The number of cached inodes."""
        return len(self._items)

    @property
    def is_idle(self) -> bool:
        """Whether the cache is empty and no lookup is in progress, so that changes need not be recorded."""
        return not self._items and not self._n_lookups

    @property
    def size_bytes(self) -> int:
        return self._n_bytes + getsizeof(self._items)

    def begin_lookup(self) -> Epoch:
        """Begin a lookup, and return its epoch. The caller must call `end_lookup`, even after an error."""
        self._n_lookups += 1
        return self.epoch

    def end_lookup(self) -> None:
        """End a lookup. The caller must store its results before this call."""
        self._n_lookups -= 1
        if not self._n_lookups:
            self._forget_changes()

    def is_unchanged(self, epoch: Epoch, source: SourceKey) -> bool:
        """Whether an inode's attributes are unchanged since a lookup with this epoch began."""
        return epoch == self.epoch or not self._has_changed(epoch, source)

    def is_name_unchanged(self, epoch: Epoch, directory: SourceKey, name: bytes) -> bool:
        """Whether a name has been neither created nor removed nor replaced since a lookup with this epoch began."""
        return epoch == self.epoch or not self._was_renamed(epoch, directory, name)

    def attributes(self, source: SourceKey, now_s: float) -> tuple[Attributes, float] | None:
        """Return an inode's attributes and the seconds for which they stay valid, or None if they are not cached."""
        item = self._items.get(source)
        if item is None or item.packed is None:
            return None
        fields = _PACKED.unpack(item.packed)
        remaining_s = fields[_N_FIELDS] - now_s
        if remaining_s <= 0:
            return None
        self._items.move_to_end(source)
        return tuple.__new__(Attributes, fields[:_N_FIELDS]), remaining_s

    def name(self, directory: SourceKey, name: bytes, now_s: float) -> tuple[SourceKey | None, float] | None:
        """Return a name's inode (None: no such name) and the seconds for which it is valid, or None if not cached."""
        item = self._items.get(directory)
        if item is None or item.names is None:
            return None
        entry = item.names.entries.get(name)
        if entry is None:
            return None
        source, until_s = entry
        if until_s <= now_s:
            return None
        self._items.move_to_end(directory)
        return source, until_s - now_s

    def has_names(self, directory: SourceKey) -> bool:
        item = self._items.get(directory)
        return item is not None and item.names is not None

    def target(self, source: SourceKey, now_s: float) -> bytes | None:
        item = self._items.get(source)
        if item is None or item.target is None or item.target[1] <= now_s:
            return None
        self._items.move_to_end(source)
        return item.target[0]

    def xattr(self, source: SourceKey, name: bytes, now_s: float, uid: int = 0) -> bytes | int | None:
        """Return an extended attribute or the errno that the user got for it, or None if neither is cached."""
        return self._xattrs(source, now_s)[0].get((uid, name))

    def _xattrs(self, source: SourceKey, now_s: float) -> tuple[UserAnswers, float]:
        """Return the cached results, and when they expire."""
        item = self._items.get(source)
        if item is not None and item.xattrs is not None:
            until_s: float = _UNTIL.unpack_from(item.xattrs)[0]
            if until_s > now_s:
                self._items.move_to_end(source)
                return unpack_xattrs(item.xattrs, _UNTIL.size), until_s
        return {}, 0

    def has_xattrs(self, source: SourceKey, names: Iterable[bytes], now_s: float) -> bool:
        return self._xattrs(source, now_s)[0].keys() >= {(0, name) for name in names}

    def listing(self, directory: SourceKey, now_s: float) -> PackedEntries | None:
        """Return all entries of a directory, in order, or None if they are not cached."""
        item = self._items.get(directory)
        if item is None or item.listing is None or item.listing[1] <= now_s:
            return None
        self._items.move_to_end(directory)
        return item.listing[0]

    def learn_attributes(self, source: SourceKey, attributes: Attributes, epoch: Epoch, now_s: float) -> None:
        """Store an inode's attributes.

        epoch  the epoch of the lookup that read them
        now_s  when that lookup began; an older result never replaces a newer one
        """
        if epoch != self.epoch and self._has_changed(epoch, source):
            return
        item = self._item(source)
        if item.packed is None or _PACKED.unpack(item.packed)[_N_FIELDS] <= now_s + self._lifetime_s:
            try:
                item.packed = _PACKED.pack(*attributes, now_s + self._lifetime_s)
            except error:  # a time after 2262, in nanoseconds
                item.packed = None
        self._make_room()

    def learn_name(
        self, directory: SourceKey, name: bytes, source: SourceKey | None, epoch: Epoch, now_s: float
    ) -> None:
        """Store the inode of a name, or None if there is no such name."""
        if epoch != self.epoch and self._was_renamed(epoch, directory, name):
            return
        item = self._item(directory)
        if item.names is None:
            item.names = _NamesOfDirectory()
            self._n_bytes += _NAMES_BYTES
        names = item.names
        before_bytes = names.n_bytes
        names.put(name, source, now_s + self._lifetime_s)
        self._n_bytes += names.n_bytes - before_bytes
        if names.n_bytes > self.largest_bytes:
            item.names = None
            self._n_bytes -= names.n_bytes
        self._make_room()

    def learn_target(self, source: SourceKey, target: bytes, epoch: Epoch, now_s: float) -> None:
        if epoch != self.epoch and self._has_changed(epoch, source):
            return
        item = self._item(source)
        self._n_bytes -= item.extra_bytes()
        if item.target is None or item.target[1] <= now_s + self._lifetime_s:
            item.target = (target, now_s + self._lifetime_s)
        self._n_bytes += item.extra_bytes()
        self._make_room()

    def learn_xattrs(self, source: SourceKey, answers: Answers, epoch: Epoch, now_s: float, uid: int = 0) -> None:
        """Store some extended attributes of an inode. The lifetime of its other cached attributes is not extended.

        uid  the user who got the results; 0: every user would get the same
        """
        if epoch != self.epoch and self._has_changed(epoch, source):
            return
        until_s = now_s + self._lifetime_s
        cached, cached_until_s = self._xattrs(source, now_s)
        for name, answer in answers.items():
            if until_s >= cached_until_s or (uid, name) not in cached:  # otherwise the cached result is newer
                cached.pop((uid, name), None)
                cached[uid, name] = answer
        cached = dict(list(cached.items())[-_MOST_XATTRS:])
        packed = pack_xattrs(cached)
        if not packed:
            return
        item = self._item(source)
        self._n_bytes -= item.extra_bytes()
        item.xattrs = _UNTIL.pack(min(until_s, cached_until_s) if len(cached) > len(answers) else until_s) + packed
        self._n_bytes += item.extra_bytes()
        self._make_room()

    def learn_listing(self, directory: SourceKey, entries: PackedEntries, epoch: Epoch, now_s: float) -> None:
        """Store all entries of a directory, unless they are too large. The caller must not extend them afterwards."""
        if epoch != self.epoch and self._was_renamed(epoch, directory, _LISTING):
            return
        n_bytes = _LISTING_BYTES + entries.n_bytes
        item = self._item(directory)
        self._n_bytes -= item.extra_bytes()
        if item.listing is None or item.listing[1] <= now_s + self._lifetime_s:
            fits = n_bytes <= self.largest_bytes
            item.listing = (entries, now_s + self._lifetime_s, n_bytes) if fits else None
        self._n_bytes += item.extra_bytes()
        self._make_room()

    def _item(self, source: SourceKey) -> _CachedInode:
        item = self._items.get(source)
        if item is None:
            item = self._items[source] = _CachedInode()
            self._n_bytes += _ITEM_BYTES + _source_bytes(source)
        else:
            self._items.move_to_end(source)
        return item

    def _make_room(self) -> None:
        items = self._items
        while items and self._n_bytes + getsizeof(items) > self._limit_bytes:
            self._subtract_bytes(*items.popitem(last=False))

    def _subtract_bytes(self, source: SourceKey, item: _CachedInode) -> None:
        self._n_bytes -= _ITEM_BYTES + _source_bytes(source) + item.extra_bytes()

    def note_access(self, source: SourceKey) -> None:
        """Record that an inode was read, so that its cached access time is out of date."""
        self._record_changes(source)
        item = self._items.get(source)
        if item is not None:
            item.packed = None

    def note_attributes_change(self, source: SourceKey) -> None:
        """Record that an inode's attributes changed, including the extended ones."""
        self.note_access(source)
        item = self._items.get(source)
        if item is not None:
            self._n_bytes -= item.extra_bytes()
            item.xattrs = None
            self._n_bytes += item.extra_bytes()

    def note_name_change(self, directory: SourceKey, name: bytes) -> None:
        """Record that a name was created, removed or replaced, which also changes the listing and the attributes."""
        self._record_changes(directory, (directory, name), (directory, _LISTING))
        item = self._items.get(directory)
        if item is None:
            return
        self._n_bytes -= item.extra_bytes()
        item.packed = item.listing = None
        if item.names is not None:
            item.names.drop(name)
        self._n_bytes += item.extra_bytes()

    def note_directory_change(self, directory: SourceKey) -> None:
        """Record that any fact about a directory may have changed, for example after its last link was removed."""
        self._record_changes(directory, (directory, None))
        item = self._items.pop(directory, None)
        if item is not None:
            self._subtract_bytes(directory, item)

    def clear(self) -> None:
        """Drop everything, including the results of lookups in progress."""
        self.epoch = Epoch(self.epoch + 1)
        self._forget_changes()
        self._items.clear()
        self._n_bytes = 0

    def _record_changes(self, *changed: _Changed) -> None:
        self.epoch = Epoch(self.epoch + 1)
        for one in changed:
            self._changed_at[one] = self.epoch
        if not self._n_lookups or len(self._changed_at) > _MOST_NOTES:
            self._forget_changes()

    def _forget_changes(self) -> None:
        self._changed_at.clear()
        self._floor = self.epoch

    def _has_changed(self, epoch: Epoch, changed: _Changed) -> bool:
        return epoch < self._floor or self._changed_at.get(changed, epoch) > epoch

    def _was_renamed(self, epoch: Epoch, directory: SourceKey, name: bytes) -> bool:
        return self._has_changed(epoch, (directory, name)) or self._has_changed(epoch, (directory, None))
