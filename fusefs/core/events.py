"""Events that concern orphans and volumes, as reported to the log, the audit log, hooks and metrics."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from enum import Enum
from typing import NamedTuple

from fusefs.core.human_units import format_duration, format_size
from fusefs.core.printable_names import printable, printable_text


class EventKind(Enum):
    """The kind of an event.

    SWAPPED, REMOVED, DROPPED, SWEPT  how a tree was moved into the store
    FOUND        an orphan was in the store when the service started, and no service had seen it before
    QUARANTINED  part of an orphan could not be removed
    EXPIRES_SOON an orphan will expire soon, and its owner may want to know
    LOW_SPACE    free space fell below the low watermark, so the reaper hurries
    BROKEN       after too many errors, the reaper pauses for a while, then tries again
    MENDED       the volume works again
    CONFIGURED   the configuration was reloaded
    CHILD_LOST   the child process that acts for a user ended, hung or was stopped
    """

    SWAPPED = "swapped"
    REMOVED = "removed"
    DROPPED = "dropped"
    SWEPT = "swept"
    FOUND = "found"
    RESTORED = "restored"
    REAPED = "reaped"
    QUARANTINED = "quarantined"
    EXPIRES_SOON = "expires-soon"
    LOW_SPACE = "low-space"
    BROKEN = "broken"
    MENDED = "mended"
    PAUSED = "paused"
    RESUMED = "resumed"
    STARTED = "started"
    STOPPED = "stopped"
    CONFIGURED = "configured"
    CHILD_LOST = "child-lost"


TAKEN = frozenset({EventKind.SWAPPED, EventKind.REMOVED, EventKind.DROPPED, EventKind.SWEPT})
"""The kinds of events in which a tree was moved into the store while the service was watching."""
WARNINGS = frozenset({EventKind.QUARANTINED, EventKind.LOW_SPACE, EventKind.CHILD_LOST})
ERRORS = frozenset({EventKind.BROKEN})


class Event(NamedTuple):
    """One event.

    at_ns      wall time
    volume     the directory that holds the store; None if the event does not concern a single volume
    uid        the orphan's owner
    id         the container's ID
    origin     the tree's full original path; None for a dropped tree
    n_entries  number of entries removed, or known to be in the tree
    n_bytes    bytes freed, or known to be used by the tree
    seconds    duration of the work; for EXPIRES_SOON, the time until the expiry
    detail     anything else that a person should know
    """

    kind: EventKind
    at_ns: int
    volume: bytes | None = None
    uid: int | None = None
    id: str | None = None
    origin: bytes | None = None
    n_entries: int | None = None
    n_bytes: int | None = None
    seconds: float | None = None
    detail: str = ""


def encode_event(event: Event) -> bytes:
    r"""Encode an event as a JSON object on one line of ASCII, without the line end; every key is always present.

    Names that are not UTF-8 contain lone surrogates (`\udcXX`), as in all JSON from trashd.
    """
    fields = {
        "at": datetime.fromtimestamp(event.at_ns // 1_000_000_000, UTC).isoformat().replace("+00:00", "Z"),
        "event": event.kind.value,
        **event._asdict(),
        "volume": _text(event.volume),
        "origin": _text(event.origin),
    }
    del fields["kind"]
    return json.dumps(fields).encode("ascii")


def to_variables(event: Event) -> dict[str, bytes]:
    """Return an event as TRASHD_* variables for a hook's environment or a journal entry; unknown values are empty.

    Paths are the kernel's bytes: make them printable before showing them.
    """
    return {
        "TRASHD_EVENT": event.kind.value.encode(),
        "TRASHD_ID": (event.id or "").encode(),
        "TRASHD_ORIGIN": event.origin or b"",
        "TRASHD_VOLUME": event.volume or b"",
        "TRASHD_UID": _number(event.uid),
        "TRASHD_ENTRIES": _number(event.n_entries),
        "TRASHD_BYTES": _number(event.n_bytes),
        "TRASHD_SECONDS": b"" if event.seconds is None else b"%.3f" % event.seconds,
    }


def describe_event(event: Event) -> str:
    """Describe an event on one line that is safe for a terminal: `reaped /a of uid 1000: 5 entries, 1.2 GiB in 12s`."""
    about = event.origin or (event.id or "").encode() or event.volume
    text = event.kind.value.replace("-", " ")
    text += f" {printable(about)}" if about else ""
    text += f" of uid {event.uid}" if event.uid is not None else ""
    amounts = []
    if event.n_entries is not None:
        amounts.append("1 entry" if event.n_entries == 1 else f"{event.n_entries:,} entries")
    if event.n_bytes is not None:
        amounts.append(format_size(event.n_bytes))
    duration = "" if event.seconds is None else f" in {format_duration(round(event.seconds))}"
    parts = [", ".join(amounts) + duration if amounts else duration.strip(), printable_text(event.detail)]
    return ": ".join([text, *filter(None, parts)])


def _text(path: bytes | None) -> str | None:
    return None if path is None else path.decode("utf-8", "surrogateescape")


def _number(number: int | None) -> bytes:
    return b"" if number is None else b"%d" % number
