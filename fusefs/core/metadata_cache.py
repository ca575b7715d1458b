"""What was seen of a backing filesystem, as long as it may be believed: attributes, extended ones, names, link targets,
listings.

Pure: the caller hands in what it saw, and the time. The cache may forget anything at any time, and never tells what
has expired, what has changed since it was seen, or half a listing.

A look at a slow filesystem takes time, and what it finds is as old as its beginning. The changes are numbered; a look
begins with the number of the newest (its epoch), and what it learns is refused if that has changed since. The number
of each change is noted while any look is under way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from struct import Struct, error
from sys import getsizeof
from typing import NewType

from fusefs.core.common_xattrs import Answers, Known, pack, unpack
from fusefs.core.inode_attributes import Attributes
from fusefs.core.nodeids import SourceKey
from fusefs.core.packed_entries import PackedEntries

Epoch = NewType("Epoch", int)
"""The number of the newest change when a look began."""

_PACKED = Struct("=QQIIIIQQQIqqqqd")
"""Attributes, and the time until which they may be believed: a fifth of what the tuple and its numbers take."""
_N_FIELDS = len(Attributes._fields)
_UNTIL = Struct("=d")
"""The time until which it is valid, before packed extended attributes."""

_Changed = SourceKey | tuple[SourceKey, bytes | None]
"""An inode's attributes; one name in a directory, or its listing; all its names (None)."""
_MOST_NOTES = 4096
_MOST_XATTRS = 32
"""Of one inode: where each user is told something else there may be many."""
_LISTING = b""
"""For a name: what a change of any name changes."""
_LARGEST_SHARE = 4
"""A directory that takes more than this part of the cache would push out all else, and itself before it is complete."""


def _allocated(size_bytes: int) -> int:
    """What an object of a size takes: memory is handed out in steps of 16 bytes."""
    return -(-size_bytes // 16) * 16


_BYTES_BYTES = getsizeof(b"") + 7  # and half a step
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
    """What names of one directory mean, each with the time until which that may be believed; None: no such name."""

    __slots__ = ("known", "n_bytes")

    def __init__(self) -> None:
        self.known: dict[bytes, tuple[SourceKey | None, float]] = {}
        self.n_bytes = _NAMES_BYTES

    def put(self, name: bytes, source: SourceKey | None, until_s: float) -> None:
        known = self.known
        before = known.get(name)
        if before is None:
            table_bytes = getsizeof(known)
            known[name] = (source, until_s)
            self.n_bytes += getsizeof(known) - table_bytes + _name_bytes(name, source)
        elif before[1] <= until_s:
            known[name] = (source, until_s)
            if before[0] != source:
                self.n_bytes += _name_bytes(name, source) - _name_bytes(name, before[0])

    def drop(self, name: bytes) -> None:
        before = self.known.pop(name, None)
        if not self.known:  # a dict that loses its entries one by one keeps the room of all
            self.known = {}
            self.n_bytes = _NAMES_BYTES
        elif before is not None:
            self.n_bytes -= _name_bytes(name, before[0])


_NAMES_BYTES = _allocated(getsizeof(object.__new__(_NamesOfDirectory))) + _NUMBER_BYTES + getsizeof({})


class _CachedInode:
    """What is known of one inode."""

    __slots__ = ("listing", "names", "packed", "target", "xattrs")

    def __init__(self) -> None:
        self.packed: bytes | None = None
        self.target: tuple[bytes, float] | None = None
        self.xattrs: bytes | None = None
        self.names: _NamesOfDirectory | None = None
        self.listing: tuple[PackedEntries, float, int] | None = None  # with the bytes that it is counted with

    def extra_bytes(self) -> int:
        """The memory of what not every inode has."""
        return (
            (0 if self.target is None else _UNTIL_BYTES + _BYTES_BYTES + len(self.target[0]))
            + (0 if self.xattrs is None else _BYTES_BYTES + len(self.xattrs))
            + (0 if self.names is None else self.names.n_bytes)
            + (0 if self.listing is None else self.listing[2])
        )


_ITEM_BYTES = _allocated(getsizeof(_CachedInode())) + _allocated(getsizeof(bytes(_PACKED.size)))


class MetadataCache:
    """Bounded in bytes; what was not asked for longest goes first, a directory with all its names."""

    __slots__ = (
        "_changed_at", "_floor", "_items", "_lifetime_s", "_limit_bytes", "_n_bytes", "_n_looks", "epoch",
        "largest_bytes",
    )  # fmt: skip

    def __init__(self, limit_bytes: int, lifetime_s: float) -> None:
        """Begin with nothing known.

        limit_bytes  of memory; 0: nothing is remembered, but changes are noted
        lifetime_s   for how long after it was seen anything may be believed
        """
        self.epoch = Epoch(0)
        """The number of the newest change: for callers that learn at once what they see, without begin and end."""
        self._limit_bytes = limit_bytes
        self.largest_bytes = limit_bytes // _LARGEST_SHARE
        """The largest listing that is remembered: gathering one may be given up beyond it."""
        self._lifetime_s = lifetime_s
        self._items: OrderedDict[SourceKey, _CachedInode] = OrderedDict()
        self._n_bytes = 0
        self._n_looks = 0
        self._changed_at: dict[_Changed, Epoch] = {}
        self._floor = self.epoch  # nothing is known of changes before: a look that began earlier learns nothing

    def __len__(self) -> int:
        """How many inodes something is known of."""
        return len(self._items)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is known and no look is under way: changes make no difference."""
        return not self._items and not self._n_looks

    @property
    def size_bytes(self) -> int:
        """The memory that it takes."""
        return self._n_bytes + getsizeof(self._items)

    def begin(self) -> Epoch:
        """A look begins; its `end` must follow, whatever happens."""
        self._n_looks += 1
        return self.epoch

    def end(self) -> None:
        """A look has learnt what it will."""
        self._n_looks -= 1
        if not self._n_looks:
            self._forget_changes()

    def is_unchanged(self, epoch: Epoch, source: SourceKey) -> bool:
        """Whether an inode's attributes are still what a look that began with an epoch saw."""
        return epoch == self.epoch or not self._has_changed(epoch, source)

    def is_named_so(self, epoch: Epoch, directory: SourceKey, name: bytes) -> bool:
        """Whether a name means still what a look that began with an epoch saw."""
        return epoch == self.epoch or not self._was_renamed(epoch, directory, name)

    def attributes(self, source: SourceKey, now_s: float) -> tuple[Attributes, float] | None:
        """What an inode is, and for how many seconds, more than 0, that may be believed; None: not known."""
        item = self._items.get(source)
        if item is None or item.packed is None:
            return None
        fields = _PACKED.unpack(item.packed)
        left_s = fields[_N_FIELDS] - now_s
        if left_s <= 0:
            return None
        self._items.move_to_end(source)
        return tuple.__new__(Attributes, fields[:_N_FIELDS]), left_s

    def name(self, directory: SourceKey, name: bytes, now_s: float) -> tuple[SourceKey | None, float] | None:
        """What a name means (None: nothing has it), and for how many seconds that may be believed; None: not known."""
        item = self._items.get(directory)
        if item is None or item.names is None:
            return None
        known = item.names.known.get(name)
        if known is None:
            return None
        source, until_s = known
        if until_s <= now_s:
            return None
        self._items.move_to_end(directory)
        return source, until_s - now_s

    def has_names(self, directory: SourceKey) -> bool:
        """Whether anything is known of the names in a directory."""
        item = self._items.get(directory)
        return item is not None and item.names is not None

    def target(self, source: SourceKey, now_s: float) -> bytes | None:
        """Where a symbolic link leads; None: not known."""
        item = self._items.get(source)
        if item is None or item.target is None or item.target[1] <= now_s:
            return None
        self._items.move_to_end(source)
        return item.target[0]

    def xattr(self, source: SourceKey, name: bytes, now_s: float, uid: int = 0) -> bytes | int | None:
        """An extended attribute, or an errno if there is none, as that user was told; None: not known."""
        return self._xattrs(source, now_s)[0].get((uid, name))

    def _xattrs(self, source: SourceKey, now_s: float) -> tuple[Known, float]:
        """What is known of them, and until when."""
        item = self._items.get(source)
        if item is not None and item.xattrs is not None:
            until_s: float = _UNTIL.unpack_from(item.xattrs)[0]
            if until_s > now_s:
                self._items.move_to_end(source)
                return unpack(item.xattrs, _UNTIL.size), until_s
        return {}, 0

    def has_xattrs(self, source: SourceKey, names: Iterable[bytes], now_s: float) -> bool:
        """Whether all of these are known."""
        return self._xattrs(source, now_s)[0].keys() >= {(0, name) for name in names}

    def listing(self, directory: SourceKey, now_s: float) -> PackedEntries | None:
        """All entries of a directory, in order; None: not known."""
        item = self._items.get(directory)
        if item is None or item.listing is None or item.listing[1] <= now_s:
            return None
        self._items.move_to_end(directory)
        return item.listing[0]

    def learn_attributes(self, source: SourceKey, seen: Attributes, epoch: Epoch, now_s: float) -> None:
        """Remember what an inode is.

        epoch  of the look that saw it
        now_s  when that look began; what was seen earlier does not replace what was seen later
        """
        if epoch != self.epoch and self._has_changed(epoch, source):
            return
        item = self._item(source)
        if item.packed is None or _PACKED.unpack(item.packed)[_N_FIELDS] <= now_s + self._lifetime_s:
            try:
                item.packed = _PACKED.pack(*seen, now_s + self._lifetime_s)
            except error:  # a time after 2262, in nanoseconds
                item.packed = None
        self._make_room()

    def learn_name(
        self, directory: SourceKey, name: bytes, source: SourceKey | None, epoch: Epoch, now_s: float
    ) -> None:
        """Remember what a name means; None: nothing has it."""
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
        """Remember where a symbolic link leads."""
        if epoch != self.epoch and self._has_changed(epoch, source):
            return
        item = self._item(source)
        self._n_bytes -= item.extra_bytes()
        if item.target is None or item.target[1] <= now_s + self._lifetime_s:
            item.target = (target, now_s + self._lifetime_s)
        self._n_bytes += item.extra_bytes()
        self._make_room()

    def learn_xattrs(self, source: SourceKey, answers: Answers, epoch: Epoch, now_s: float, uid: int = 0) -> None:
        """Remember some of its extended attributes, and what is known of the others for no longer than before.

        uid  that was told; 0: every uid would be
        """
        if epoch != self.epoch and self._has_changed(epoch, source):
            return
        until_s = now_s + self._lifetime_s
        known, known_until_s = self._xattrs(source, now_s)
        for name, answer in answers.items():
            if until_s >= known_until_s or (uid, name) not in known:  # else it was seen later already
                known.pop((uid, name), None)
                known[uid, name] = answer
        known = dict(list(known.items())[-_MOST_XATTRS:])
        packed = pack(known)
        if not packed:
            return
        item = self._item(source)
        self._n_bytes -= item.extra_bytes()
        item.xattrs = _UNTIL.pack(min(until_s, known_until_s) if len(known) > len(answers) else until_s) + packed
        self._n_bytes += item.extra_bytes()
        self._make_room()

    def learn_listing(self, directory: SourceKey, entries: PackedEntries, epoch: Epoch, now_s: float) -> None:
        """Remember all entries of a directory, to which none is added from now on; if they are too many, none."""
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
            self._count_out(*items.popitem(last=False))

    def _count_out(self, source: SourceKey, item: _CachedInode) -> None:
        self._n_bytes -= _ITEM_BYTES + _source_bytes(source) + item.extra_bytes()

    def accessed(self, source: SourceKey) -> None:
        """An inode was read: of its attributes the time of access is not what it was."""
        self._note(source)
        item = self._items.get(source)
        if item is not None:
            item.packed = None

    def attributes_changed(self, source: SourceKey) -> None:
        """An inode's attributes are not what they were; the extended ones neither."""
        self.accessed(source)
        item = self._items.get(source)
        if item is not None:
            self._n_bytes -= item.extra_bytes()
            item.xattrs = None
            self._n_bytes += item.extra_bytes()

    def name_changed(self, directory: SourceKey, name: bytes) -> None:
        """A name means something else, or nothing, or something at last: so listing and attributes changed too."""
        self._note(directory, (directory, name), (directory, _LISTING))
        item = self._items.get(directory)
        if item is None:
            return
        self._n_bytes -= item.extra_bytes()
        item.packed = item.listing = None
        if item.names is not None:
            item.names.drop(name)
        self._n_bytes += item.extra_bytes()

    def directory_changed(self, directory: SourceKey) -> None:
        """All that is known of a directory may be wrong, or of another inode: its last link went, say."""
        self._note(directory, (directory, None))
        item = self._items.pop(directory, None)
        if item is not None:
            self._count_out(directory, item)

    def clear(self) -> None:
        """All that is known may be wrong, and what a look sees that has begun."""
        self.epoch = Epoch(self.epoch + 1)
        self._forget_changes()
        self._items.clear()
        self._n_bytes = 0

    def _note(self, *changed: _Changed) -> None:
        self.epoch = Epoch(self.epoch + 1)
        for one in changed:
            self._changed_at[one] = self.epoch
        if not self._n_looks or len(self._changed_at) > _MOST_NOTES:
            self._forget_changes()

    def _forget_changes(self) -> None:
        self._changed_at.clear()
        self._floor = self.epoch

    def _has_changed(self, epoch: Epoch, changed: _Changed) -> bool:
        return epoch < self._floor or self._changed_at.get(changed, epoch) > epoch

    def _was_renamed(self, epoch: Epoch, directory: SourceKey, name: bytes) -> bool:
        return self._has_changed(epoch, (directory, name)) or self._has_changed(epoch, (directory, None))
