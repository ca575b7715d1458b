"""Heartbeats of the nodes that serve a volume: their format, and which nodes are alive by the watcher's clock; pure.

A heartbeat only shows which nodes may be alive. It decides how often to check for other nodes' changes, and what is
shown to people. It never decides which node removes a tree: the claim (the lock of the record) does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, NamedTuple

import msgspec

from fusefs.core.service_status import SeenNode

BEAT_S = 30.0
SILENT_S = 3 * BEAT_S
"""A node counts as silent once its heartbeat has not changed for so long."""
FORGOTTEN_S = 3 * 86_400.0
"""A heartbeat is removed so long after its last change: after a weekend people can still see which node is missing."""
BEAT_BYTES = 512
"""Every heartbeat has this size: a single call overwrites it in place, without a new block."""
LEAST_POLL_S = 10.0
"""Shortest time between two checks for other nodes' changes."""
_N_RESTS = 20
"""After a check the watcher waits at least so many times the duration of that check."""
_MOST_AT_ONCE_S = 2 * BEAT_S
"""A check adds at most so much to a silence: a watcher that was frozen must not count its own pause as silence."""
_HOST_CHARS = 64
_NAME = re.compile(rb"([A-Za-z0-9_-][A-Za-z0-9._-]{0,63})\.([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})")
_Word = Annotated[str, msgspec.Meta(max_length=_HOST_CHARS)]


class NodeBeat(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a heartbeat, which a service writes.

    started_ns  wall time at which the service started; together with `n` it identifies a heartbeat
    n           number of heartbeats since then
    phase       what the service does on this volume
    probe_ms    how long small durable writes take there, measured on this node; None: not known
    """

    started_ns: int
    n: int
    version: _Word
    phase: _Word
    probe_ms: float | None = None


def beat_name(host: str, boot_id: str) -> bytes:
    """The file name of a node's heartbeat: the plain characters of its host name, then its boot id."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", host)[:_HOST_CHARS].lstrip(".") or "_"
    return f"{plain}.{boot_id}".encode("ascii")


def is_beat_name(name: bytes) -> bool:
    """Whether `beat_name` could have made this name."""
    return _NAME.fullmatch(name) is not None


def encode_beat(beat: NodeBeat) -> bytes:
    """Encode as JSON, padded with blanks to BEAT_BYTES."""
    return msgspec.json.encode(beat).ljust(BEAT_BYTES - 1) + b"\n"


def decode_beat(text: bytes) -> NodeBeat | None:
    """Decode what `encode_beat` wrote; None for anything else, such as a half-written heartbeat."""
    try:
        return msgspec.json.decode(text, type=NodeBeat)
    except (msgspec.MsgspecError, ValueError):
        return None


class _Watched(NamedTuple):
    """A heartbeat at the last check.

    unchanged_s  how long it has been watched since it last changed, or since the first check that read it
    has_changed  whether it changed while it was watched
    """

    beat: NodeBeat | None
    unchanged_s: float = 0.0
    has_changed: bool = False


class BeatWatch:
    """The heartbeats of a volume as one watcher saw them, by its own monotonic clock in seconds."""

    def __init__(self) -> None:
        self._watched: dict[bytes, _Watched] = {}
        self._looked_s: float | None = None

    def look(self, beats: Mapping[bytes, NodeBeat | None], now_s: float) -> set[bytes]:
        """Record the present heartbeats (None: unreadable). Returns  the nodes that were alive and no longer are"""
        before = self.alive()
        passed_s = 0.0 if self._looked_s is None else min(max(now_s - self._looked_s, 0.0), _MOST_AT_ONCE_S)
        self._looked_s = now_s
        self._watched = {name: self._seen(name, beat, passed_s) for name, beat in beats.items()}
        return before - self.alive()

    def _seen(self, name: bytes, beat: NodeBeat | None, passed_s: float) -> _Watched:
        last = self._watched.get(name)
        if last is None:
            return _Watched(beat)
        if beat is not None and beat != last.beat:
            return _Watched(beat, has_changed=last.beat is not None)
        return _Watched(last.beat, last.unchanged_s + passed_s, last.has_changed)

    def alive(self) -> set[bytes]:
        """The nodes whose heartbeats changed within the last SILENT_S."""
        return {name for name, one in self._watched.items() if _lives(one)}

    def forgotten(self) -> list[bytes]:
        """The names of heartbeats that have not changed for FORGOTTEN_S."""
        return [name for name, one in self._watched.items() if one.unchanged_s >= FORGOTTEN_S]

    def told(self, own: bytes | None) -> tuple[SeenNode, ...]:
        """All nodes, for people. own: the name of our own heartbeat, if we have one"""
        return tuple(_told(name, one, is_here=name == own) for name, one in sorted(self._watched.items()))


def _lives(seen: _Watched) -> bool:
    return seen.has_changed and seen.unchanged_s < SILENT_S


def _told(name: bytes, seen: _Watched, *, is_here: bool) -> SeenNode:
    matched = _NAME.fullmatch(name)
    host, boot_id = (b"", b"") if matched is None else matched.groups()
    beat = seen.beat
    is_young = not seen.has_changed and seen.unchanged_s < SILENT_S
    return SeenNode(
        host=host.decode("ascii"),
        boot_id=boot_id.decode("ascii"),
        is_here=is_here,
        is_alive=True if is_here else None if is_young else _lives(seen),
        unchanged_s=0.0 if is_here else round(seen.unchanged_s, 1),
        version="" if beat is None else beat.version,
        phase="" if beat is None else beat.phase,
        probe_ms=None if beat is None else beat.probe_ms,
    )


class PollInterval:
    """The time until the next check for other nodes' changes: short while something happens, then ever longer."""

    def __init__(self, least_s: float = LEAST_POLL_S) -> None:
        """least_s: the shortest time between two checks"""
        self._least_s = least_s
        self._wait_s = least_s / 2

    def after(self, took_s: float, most_s: float, *, is_lively: bool) -> float:
        """Seconds until the next check.

        took_s     how long this check took
        most_s     the longest wait allowed, whatever took_s is
        is_lively  whether something has changed, or other nodes serve the volume
        """
        self._wait_s = self._least_s if is_lively else min(2 * self._wait_s, most_s)
        return min(max(self._wait_s, _N_RESTS * took_s), most_s)
