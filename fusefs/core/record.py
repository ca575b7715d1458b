"""The record of a container: what a person or recovery must know about the tree beside it.

It is read back, and distrusted, in `core.record_decoding`.
"""

from __future__ import annotations

import json
from enum import Enum
from typing import Any, NamedTuple

from fusefs.core.identity import Identity
from fusefs.core.names import ContainerId, Name, RelPath, VolumeId
from fusefs.core.orphan_age import Now
from fusefs.core.printable_names import unescape

FORMAT = 1
RECORD_MAX_BYTES = 64 * 1024
NOTE_MAX_CHARS = 2000
MAX_ENTERED = 100
"""Directories of others that a reap notes: it has few more open at a time."""
MAX_FAILURES = 50
"""Failures kept by name: a record must stay below 64 KiB, and the millionth is never read."""


class Method(Enum):
    """How the tree came into the store."""

    EXCHANGE = "exchange"
    TWO_RENAME = "two-rename"
    REMOVED = "removed"
    DROPPED = "dropped"
    SWEEP = "sweep"


class Failure(NamedTuple):
    """One thing that could not be done.

    name   path of the entry inside the tree
    errno  what the kernel said
    call   the call that it said it to
    """

    name: bytes
    errno: int
    call: str


class Entered(NamedTuple):
    """A directory of another's in which a reap stopped or failed; its own changes are no reason for doubt.

    handle    of its identity
    ctime_ns  when it was last changed: by that reap, and not since, as long as it is the same
    """

    handle: str
    ctime_ns: int


class KeptDirectory(NamedTuple):
    """A directory in the top of the victim's that stays in view: after the exchange it goes into the fresh one.

    ino  its inode number; 0 where numbers don't last. It never proves more than that something else has the name.
    """

    name: Name
    ino: int


class KeptEntries(NamedTuple):
    """What of a victim's top entries stays in view (`swap --keep`).

    globs        what was asked for
    files        all but directories
    """

    globs: tuple[str, ...]
    files: tuple[Name, ...]
    directories: tuple[KeptDirectory, ...]

    def names(self) -> tuple[bytes, ...]:
        """All of it, sorted."""
        return tuple(sorted([*self.files, *(one.name for one in self.directories)]))


class NewOwner(NamedTuple):
    """Whom root swapped something for (`swap --for-owner`): he gets the orphan, with that retention."""

    uid: int
    retention_s: int | None


class Invocation(NamedTuple):
    """The command that a person gave.

    id       random, the same in all that it took away
    session  of the terminal that it was given in; empty where that is not known
    """

    id: str
    session: str


class TreeSize(NamedTuple):
    """What a tree takes, as far as it is known.

    n_entries     with the tree itself; None: not told
    n_bytes       of all its inodes, each once
    linked_bytes  of these: they stay, as hard links outside keep them
    shared_bytes  of these: at most as many stay, as snapshots or reflinks share them; None: nothing tells how many
    is_at_least   not all was counted
    source        who said so: `count` (a walk), `sweep` (which saw what it took), or a filesystem: `cephfs`, `juicefs`,
                  `qgroup`
    at_ns         when, wall time
    """

    n_entries: int | None
    n_bytes: int
    linked_bytes: int
    shared_bytes: int | None
    is_at_least: bool
    source: str
    at_ns: int

    def most_freed(self) -> int:
        """Bytes that come back when it goes, if nothing shares them; of what was not counted none."""
        return max(self.n_bytes - self.linked_bytes, 0)

    def surely_freed(self) -> int:
        """Bytes that come back whatever is shared, as far as that is told."""
        return max(self.most_freed() - (self.shared_bytes or 0), 0)

    def may_share(self) -> bool:
        """Whether less may come back, as others have some of it too."""
        return self.shared_bytes != 0


class Record(NamedTuple):
    """What record.json says.

    origin       path of the victim relative to the directory that holds the store; None for what was dropped. Of a
                 sweep it is the directory that was swept, empty if that holds the store
    parent       the victim's parent directory; the one that was swept
    fresh        the directory that took the victim's place; None where none did
    victim       the tree; a sweep makes it, and puts into it what it takes
    host, boot   machine id (or host name) and boot id of the host that made it, or was the last to restore it
    created_ns   wall time
    boot_ns      the same by CLOCK_BOOTTIME of that boot, which can't be set; None: not told
    retention_s  seconds until it may be reaped; None means never unless asked
    superblock   as what the kernel had the filesystem mounted: major:minor, one mount of it at a time; empty: not told
    lent_mode    permission bits that the victim had before its owner lent himself more for the rename; None
                 if nothing was lent. Set before the loan, so that recovery can take it back.
    lent_fresh   the same for the fresh directory when a restore moves it: its mode may be another one by then
    target       where a restore takes a tree that has a loan, if not to its origin: relative like that
    heir         the user who is to get the tree, as long as root has it; None: the user whose folder it is in
    kept         directories that stay in view (`swap --keep`), while files do so by a link; None if nothing was kept
    moved_ns     the filesystem's own clock just before the tree came: what was moved later was not given (security.md);
                 of a sweep, when all had come; None in records made before, where the container's birth tells
    taken_from   uid of the user whose container the tree is (store/as_owner.py): what only they can move is no doubt
    entered      directories of others in which a reap stopped or failed
    partial      the reaper had begun: the tree is not whole any more
    failures     why it is in quarantine
    invocation   the command that took it away, for `restore --last`; None if nobody gave one, or an older one did
    size         what the tree took when that was last asked; None: not known, or something went out of it since
    parts        paths in the tree of what a restore moved to the fresh directory: a restore of the whole takes it back
    unknown      keys of a later minor version: kept, never understood
    """

    id: ContainerId
    volume: VolumeId
    method: Method
    origin: RelPath | None
    parent: Identity | None
    fresh: Identity | None
    victim: Identity | None
    host: str
    boot: str
    created_ns: int
    retention_s: int | None
    superblock: str = ""
    boot_ns: int | None = None
    note: str = ""
    lent_mode: int | None = None
    lent_fresh: int | None = None
    target: RelPath | None = None
    heir: NewOwner | None = None
    kept: tuple[KeptDirectory, ...] | None = None
    moved_ns: int | None = None
    taken_from: int | None = None
    entered: tuple[Entered, ...] = ()
    partial: bool = False
    failures: tuple[Failure, ...] = ()
    invocation: Invocation | None = None
    size: TreeSize | None = None
    parts: tuple[RelPath, ...] = ()
    unknown: tuple[tuple[str, Any], ...] = ()

    def adopted_expires_ns(self) -> int | None:
        """When it may be reaped once its heir, if it has one, has it; by the wall clock."""
        return (self if self.heir is None else self._replace(retention_s=self.heir.retention_s)).expires_ns()

    def expires_ns(self, now: Now | None = None) -> int | None:
        """Wall time after which it may be reaped; None for never.

        now  tells it as the wall clock runs now, should that have been set since the record was made
        """
        if self.retention_s is None:
            return None
        return self.created_ns + self.retention_s * 1_000_000_000 + (0 if now is None else self.clock_set_ns(now))

    def clock_set_ns(self, now: Now) -> int:
        """By how much the wall clock was set forward since it was made; negative for back."""
        return now.set_ns(self.created_ns, self.boot_ns, self.boot)

    def age_ns(self, now: Now) -> int:
        """The time since it was made, negative if its maker's clock was ahead of ours."""
        return now.since(self.created_ns, self.boot_ns, self.boot)


_LEFT_OUT = (
    "superblock",
    "boot_ns",
    "heir",
    "kept",
    "moved_ns",
    "taken_from",
    "entered",
    "invocation",
    "size",
    "parts",
)
"""Keys that are not written for a record that says nothing by them."""


def encode(record: Record) -> bytes:
    """record.json's bytes: one JSON object, indented, for eyes at three in the morning.

    Raises  ValueError if it would not fit into `RECORD_MAX_BYTES`
    """
    fields: dict[str, Any] = {"format": FORMAT, **record._asdict()}
    del fields["unknown"]
    fields |= dict(record.unknown)
    fields["method"] = record.method.value
    for key in ("origin", "target"):
        fields[key] = None if fields[key] is None else quote(fields[key])
    for key in ("parent", "fresh", "victim", "heir", "invocation", "size"):
        fields[key] = fields[key] and fields[key]._asdict()
    fields["kept"] = None if record.kept is None else {quote(one.name): one.ino for one in record.kept}
    fields["entered"] = dict(record.entered) or None
    fields["parts"] = [quote(part) for part in record.parts] or None
    fields["superblock"] = record.superblock or None
    for key in _LEFT_OUT:
        if fields[key] is None:
            del fields[key]
    fields["failures"] = [{**f._asdict(), "name": quote(f.name)} for f in record.failures]
    text = json.dumps(fields, indent=1).encode("ascii") + b"\n"
    if len(text) > RECORD_MAX_BYTES:
        raise ValueError(f"a record of {len(text)} bytes is too large (at most {RECORD_MAX_BYTES})")
    return text


def quote(path: bytes) -> str:
    """Bytes as ASCII text, all but printable ASCII as %XX, as the FreeDesktop trash writes its paths."""
    text = path.decode("latin-1")
    if text.isascii() and text.isprintable() and "%" not in text:
        return text
    return "".join(c if " " <= c <= "~" and c != "%" else f"%{ord(c):02X}" for c in text)


def unquote(text: str) -> bytes:
    """The bytes that `quote` wrote.

    Raises  ValueError for anything that `quote` never writes
    """
    raw = unescape(text.encode("ascii"), b"%", 2, 16)
    if quote(raw) != text:
        raise ValueError("not a quoted path")
    return raw
