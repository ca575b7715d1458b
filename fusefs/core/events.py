"""What happens to orphans and volumes, as the log, the audit log, hooks and metrics are told of it."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from enum import Enum
from typing import NamedTuple

from fusefs.core.human_units import format_duration, format_size
from fusefs.core.printable_names import printable, show


class EventKind(Enum):
    """What happened.

    SWAPPED, REMOVED, DROPPED, SWEPT  a tree came into the store: how
    FOUND        it was there when the service started, and no service had seen it before
    QUARANTINED  some of it could not be removed
    EXPIRES_SOON its term ends in a while: its owner may want to know
    LOW_SPACE    a volume went below its low watermark: it hurries
    BROKEN       too many errors: the volume rests for a while, and is then tried again
    MENDED       it works again
    CONFIGURED   the configuration was read again
    CHILD_LOST   the process that acts for a user ended, hung or was stopped
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
"""A tree went from its place into the store while we watched."""
WARNINGS = frozenset({EventKind.QUARANTINED, EventKind.LOW_SPACE, EventKind.CHILD_LOST})
ERRORS = frozenset({EventKind.BROKEN})


class Event(NamedTuple):
    """One thing that happened.

    at_ns      wall time
    volume     the directory that holds the store; None if it was about no single volume
    uid        whose orphan it was
    id         the container's
    origin     where the tree came from, in full; None for what was dropped
    n_entries  removed, or known to be in it
    n_bytes    freed, or known to be taken by it
    seconds    how long the work took; of EXPIRES_SOON, until its term ends
    detail     what else a person should know
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


def encode(event: Event) -> bytes:
    r"""An event as one JSON object on one line of ASCII, without its end; all keys are always there.

    Names that are not UTF-8 have lone surrogates (`\udcXX`), as all of trashd's JSON has.
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


def variables(event: Event) -> dict[str, bytes]:
    """An event as TRASHD_* variables, for a hook's environment and a journal's fields; empty for what is unknown.

    Paths are the kernel's own bytes: to be made printable where they are shown.
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


def describe(event: Event) -> str:
    """One line for a person, safe for a terminal: `reaped /scratch/job of uid 1000: 12,345 entries, 1.2 GiB in 12s`."""
    about = event.origin or (event.id or "").encode() or event.volume
    text = event.kind.value.replace("-", " ")
    text += f" {printable(about)}" if about else ""
    text += f" of uid {event.uid}" if event.uid is not None else ""
    amounts = []
    if event.n_entries is not None:
        amounts.append("1 entry" if event.n_entries == 1 else f"{event.n_entries:,} entries")
    if event.n_bytes is not None:
        amounts.append(format_size(event.n_bytes))
    took = "" if event.seconds is None else f" in {format_duration(round(event.seconds))}"
    parts = [", ".join(amounts) + took if amounts else took.strip(), show(event.detail)]
    return ": ".join([text, *filter(None, parts)])


def _text(path: bytes | None) -> str | None:
    return None if path is None else path.decode("utf-8", "surrogateescape")


def _number(number: int | None) -> bytes:
    return b"" if number is None else b"%d" % number
