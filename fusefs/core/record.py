"""The record of a container: what people and recovery must know about the tree next to it.

`core.record_decoding` reads it back and checks it, because users can write records.
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
"""The most directories of other users that a reap records; it keeps only a few more open at a time."""
MAX_FAILURES = 50
"""The most failures that are recorded by name: a record must stay below 64 KiB."""


class Method(Enum):
    """The way in which a tree was moved into the store."""

    EXCHANGE = "exchange"
    TWO_RENAME = "two-rename"
    REMOVED = "removed"
    DROPPED = "dropped"
    SWEEP = "sweep"


class Failure(NamedTuple):
    """An entry that could not be processed.

    name   path of the entry inside the tree
    errno  the kernel's error
    call   the system call that failed
    """

    name: bytes
    errno: int
    call: str


class Entered(NamedTuple):
    """A directory of another user in which a reap stopped or failed.

    A later reap must not mistake this reap's own changes in the directory for late arrivals.

    handle    the directory's file handle
    ctime_ns  its ctime after the last change by that reap; as long as it is the same, nothing else has changed there
    """

    handle: str
    ctime_ns: int


class KeptDirectory(NamedTuple):
    """A top-level directory of the victim that users keep: after the exchange it is moved into the replacement.

    ino  its inode number; 0 if inode numbers are not persistent. A different number proves that the name was reused
    """

    name: Name
    ino: int


class KeptEntries(NamedTuple):
    """The top-level entries of a victim that stay in the directory (`swap --keep`).

    globs  the patterns on the command line
    files  all entries except directories
    """

    globs: tuple[str, ...]
    files: tuple[Name, ...]
    directories: tuple[KeptDirectory, ...]

    def names(self) -> tuple[bytes, ...]:
        """Return the names of all these entries, sorted."""
        return tuple(sorted([*self.files, *(one.name for one in self.directories)]))


class NewOwner(NamedTuple):
    """The user for whom root swapped a directory (`swap --for-owner`): they get the orphan, with this retention."""

    uid: int
    retention_s: int | None


class Invocation(NamedTuple):
    """One command that a user ran.

    id       random; the same in all records that the command made
    session  the terminal session of the command; empty if not known
    """

    id: str
    session: str


class TreeSize(NamedTuple):
    """The space that a tree takes, as far as it is known.

    n_entries     number of entries including the tree itself; None: not known
    n_bytes       space of all its inodes, each counted once
    linked_bytes  the part of n_bytes that deleting the tree does not free, because of hard links outside
    shared_bytes  the most that may remain in use after a delete, because snapshots or reflinks share it; None: not
                  known
    is_at_least   not everything was counted
    source        how the size was measured: `count` (by a walk), `sweep` (while the sweep took the files), or by the
                  filesystem: `cephfs`, `juicefs`, `qgroup`
    at_ns         when it was measured, wall time
    """

    n_entries: int | None
    n_bytes: int
    linked_bytes: int
    shared_bytes: int | None
    is_at_least: bool
    source: str
    at_ns: int

    def most_freed(self) -> int:
        """Return the bytes that a delete frees if nothing shares them; entries that were not counted are ignored."""
        return max(self.n_bytes - self.linked_bytes, 0)

    def surely_freed(self) -> int:
        """Return the bytes that a delete frees even if everything in shared_bytes is shared."""
        return max(self.most_freed() - (self.shared_bytes or 0), 0)

    def may_share(self) -> bool:
        """Whether a delete might free less because the tree might share blocks with other files."""
        return self.shared_bytes != 0


class Record(NamedTuple):
    """The content of record.json.

    origin       path of the victim relative to the directory that holds the store; None for a dropped tree. For a
                 sweep: the path of the swept directory, empty if that directory holds the store
    parent       the victim's parent directory; for a sweep, the swept directory
    fresh        the replacement, which took the victim's place; None if there is none
    victim       the tree; a sweep creates it and moves the matches into it
    host, boot   machine ID (or host name) and boot ID of the host that made or last restored the container
    created_ns   wall time
    boot_ns      the same moment in CLOCK_BOOTTIME of that boot, which can't be set; None: not recorded
    retention_s  seconds until the orphan may be reaped; None: only on request
    superblock   major:minor of the mounted filesystem, which may change with each mount; empty: not recorded
    lent_mode    permission bits that the victim had before its owner got a temporary permission for the rename; None
                 if none was needed. Recorded before the change, so that recovery can undo it
    lent_fresh   the same for the replacement when a restore moves it: its mode may have changed by then
    target       path to which a restore moves a tree with a temporary permission, if not `origin`, and relative like it
    heir         the user who is to get the tree while root still has it; None: the owner of the folder that holds it
    kept         directories that stay in the replacement (`swap --keep`), where files stay as hard links; None if there
                 are none
    moved_ns     time by the filesystem's clock just before the tree was moved in: entries moved into the tree later are
                 late arrivals (security.md). For a sweep, the time after its last move. None in older records, for
                 which the container's birth time is used
    taken_from   UID of the user whose container holds the tree (store/as_owner.py): entries that only this user can
                 have moved are trusted
    entered      directories of other users in which a reap stopped or failed
    partial      a reap has begun, so the tree is no longer complete
    failures     why the container is in quarantine
    invocation   the command that took the tree, for `restore --last`; None if it was not a user's command, or if the
                 record is from an older version
    size         the size of the tree when it was last measured; None: not known, or parts of it were moved out since
    parts        paths in the tree that a restore moved to the replacement: restoring the whole tree moves them back
    unknown      keys of a later minor version, which are kept but never interpreted
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
        """Return the wall time after which the orphan may be reaped; None means never.

        If the orphan has an heir, the heir's retention applies.
        """
        return (self if self.heir is None else self._replace(retention_s=self.heir.retention_s)).expires_ns()

    def expires_ns(self, now: Now | None = None) -> int | None:
        """Return the wall time after which the orphan may be reaped; None means never.

        now  used to correct this time for changes to the wall clock since the record was made
        """
        if self.retention_s is None:
            return None
        return self.created_ns + self.retention_s * 1_000_000_000 + (0 if now is None else self.clock_set_ns(now))

    def clock_set_ns(self, now: Now) -> int:
        """Return how far the wall clock was set forward since the record was made (negative: back)."""
        return now.clock_change_ns(self.created_ns, self.boot_ns, self.boot)

    def age_ns(self, now: Now) -> int:
        """Return the time since the record was made, or a negative time if the clock of its host was ahead of ours."""
        return now.since(self.created_ns, self.boot_ns, self.boot)


_OMITTED_IF_EMPTY = (
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
"""Keys that are omitted from a record if their value is empty."""


def encode_record(record: Record) -> bytes:
    """Encode a record as one indented JSON object.

    Raises  ValueError if the result would be longer than `RECORD_MAX_BYTES`
    """
    fields: dict[str, Any] = {"format": FORMAT, **record._asdict()}
    del fields["unknown"]
    fields |= dict(record.unknown)
    fields["method"] = record.method.value
    for key in ("origin", "target"):
        fields[key] = None if fields[key] is None else quote_path(fields[key])
    for key in ("parent", "fresh", "victim", "heir", "invocation", "size"):
        fields[key] = fields[key] and fields[key]._asdict()
    fields["kept"] = None if record.kept is None else {quote_path(one.name): one.ino for one in record.kept}
    fields["entered"] = dict(record.entered) or None
    fields["parts"] = [quote_path(part) for part in record.parts] or None
    fields["superblock"] = record.superblock or None
    for key in _OMITTED_IF_EMPTY:
        if fields[key] is None:
            del fields[key]
    fields["failures"] = [{**f._asdict(), "name": quote_path(f.name)} for f in record.failures]
    text = json.dumps(fields, indent=1).encode("ascii") + b"\n"
    if len(text) > RECORD_MAX_BYTES:
        raise ValueError(f"a record of {len(text)} bytes is too large (at most {RECORD_MAX_BYTES})")
    return text


def quote_path(path: bytes) -> str:
    """Format bytes as ASCII text: everything except printable ASCII becomes %XX, as in FreeDesktop trash files."""
    text = path.decode("latin-1")
    if text.isascii() and text.isprintable() and "%" not in text:
        return text
    return "".join(c if " " <= c <= "~" and c != "%" else f"%{ord(c):02X}" for c in text)


def unquote_path(text: str) -> bytes:
    """Decode what `quote_path` wrote.

    Raises  ValueError for anything that `quote_path` never writes
    """
    raw = unescape(text.encode("ascii"), b"%", 2, 16)
    if quote_path(raw) != text:
        raise ValueError("not a quoted path")
    return raw
