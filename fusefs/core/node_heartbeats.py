"""Heartbeats of the nodes that serve a volume: their format, and how a watcher decides which nodes are alive; pure.

A heartbeat only shows that a node may be alive. Heartbeats determine how often we check for other nodes' changes, and
what we show to people. They never determine which node removes a tree: the claim (the lock on the record) does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, NamedTuple

import msgspec

from fusefs.core.service_status import SeenNode

HEARTBEAT_S = 30.0
SILENT_S = 3 * HEARTBEAT_S
"""A node counts as silent once its heartbeat has not changed for this long."""
FORGOTTEN_S = 3 * 86_400.0
"""A heartbeat is removed this long after its last change: after a weekend, it still shows which node is missing."""
HEARTBEAT_BYTES = 512
"""The size of every heartbeat: a single call overwrites it in place, without allocating a block."""
LEAST_POLL_S = 10.0
"""Shortest time between two checks for other nodes' changes."""
_WAIT_FACTOR = 20
"""After a check, the watcher waits for at least this multiple of the check's duration."""
_MAX_STEP_S = 2 * HEARTBEAT_S
"""The most that one check adds to a silence: a watcher that was frozen must not count its own pause as silence."""
_HOST_CHARS = 64
_NAME = re.compile(rb"([A-Za-z0-9_-][A-Za-z0-9._-]{0,63})\.([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})")
_ShortText = Annotated[str, msgspec.Meta(max_length=_HOST_CHARS)]


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a heartbeat file, which a service writes.

    started_ns  wall time at which the service started; together with `n` it identifies a heartbeat
    n           number of heartbeats written since then
    phase       what the service is doing on this volume
    probe_ms    how long a small durable write to the volume takes, measured on this node; None: not known
    """

    started_ns: int
    n: int
    version: _ShortText
    phase: _ShortText
    probe_ms: float | None = None


def heartbeat_name(host: str, boot_id: str) -> bytes:
    """Return the file name of a node's heartbeat: its host name, with `_` for unusual characters, and its boot ID."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", host)[:_HOST_CHARS].lstrip(".") or "_"
    return f"{plain}.{boot_id}".encode("ascii")


def is_heartbeat_name(name: bytes) -> bool:
    """Whether `heartbeat_name` could have returned this name."""
    return _NAME.fullmatch(name) is not None


def encode_heartbeat(heartbeat: Heartbeat) -> bytes:
    """Encode a heartbeat as JSON, padded with blanks to HEARTBEAT_BYTES."""
    return msgspec.json.encode(heartbeat).ljust(HEARTBEAT_BYTES - 1) + b"\n"


def decode_heartbeat(text: bytes) -> Heartbeat | None:
    """Decode what `encode_heartbeat` wrote; return None for anything else, such as a half-written heartbeat."""
    try:
        return msgspec.json.decode(text, type=Heartbeat)
    except (msgspec.MsgspecError, ValueError):
        return None


class _WatchedHeartbeat(NamedTuple):
    """A heartbeat at the last check.

    unchanged_s  how long it has been watched without a change
    has_changed  whether it has changed while it was watched
    """

    beat: Heartbeat | None
    unchanged_s: float = 0.0
    has_changed: bool = False


class HeartbeatWatch:
    """The heartbeats of a volume as seen by one watcher, whose own monotonic clock gives the times in seconds."""

    def __init__(self) -> None:
        self._watched: dict[bytes, _WatchedHeartbeat] = {}
        self._updated_s: float | None = None

    def update(self, heartbeats: Mapping[bytes, Heartbeat | None], now_s: float) -> set[bytes]:
        """Record the present heartbeats (None: unreadable). Return the nodes that became silent since the last call."""
        alive_before = self.alive_nodes()
        passed_s = 0.0 if self._updated_s is None else min(max(now_s - self._updated_s, 0.0), _MAX_STEP_S)
        self._updated_s = now_s
        self._watched = {name: self._advance(name, beat, passed_s) for name, beat in heartbeats.items()}
        return alive_before - self.alive_nodes()

    def _advance(self, name: bytes, heartbeat: Heartbeat | None, passed_s: float) -> _WatchedHeartbeat:
        last = self._watched.get(name)
        if last is None:
            return _WatchedHeartbeat(heartbeat)
        if heartbeat is not None and heartbeat != last.beat:
            return _WatchedHeartbeat(heartbeat, has_changed=last.beat is not None)
        return _WatchedHeartbeat(last.beat, last.unchanged_s + passed_s, last.has_changed)

    def alive_nodes(self) -> set[bytes]:
        """Return the nodes whose heartbeats changed within the last SILENT_S."""
        return {name for name, one in self._watched.items() if _is_alive(one)}

    def expired_names(self) -> list[bytes]:
        """Return the names of the heartbeats that have not changed for FORGOTTEN_S."""
        return [name for name, one in self._watched.items() if one.unchanged_s >= FORGOTTEN_S]

    def list_nodes(self, own: bytes | None) -> tuple[SeenNode, ...]:
        """Return all nodes, to be shown to people. own: the name of our own heartbeat, if we have one"""
        return tuple(_to_seen_node(name, one, is_here=name == own) for name, one in sorted(self._watched.items()))


def _is_alive(watched: _WatchedHeartbeat) -> bool:
    return watched.has_changed and watched.unchanged_s < SILENT_S


def _to_seen_node(name: bytes, watched: _WatchedHeartbeat, *, is_here: bool) -> SeenNode:
    matched = _NAME.fullmatch(name)
    host, boot_id = (b"", b"") if matched is None else matched.groups()
    heartbeat = watched.beat
    is_young = not watched.has_changed and watched.unchanged_s < SILENT_S
    return SeenNode(
        host=host.decode("ascii"),
        boot_id=boot_id.decode("ascii"),
        is_here=is_here,
        is_alive=True if is_here else None if is_young else _is_alive(watched),
        unchanged_s=0.0 if is_here else round(watched.unchanged_s, 1),
        version="" if heartbeat is None else heartbeat.version,
        phase="" if heartbeat is None else heartbeat.phase,
        probe_ms=None if heartbeat is None else heartbeat.probe_ms,
    )


class PollInterval:
    """The time until the next check for other nodes' changes: short after a change, doubled after each other check."""

    def __init__(self, least_s: float = LEAST_POLL_S) -> None:
        self._least_s = least_s
        self._wait_s = least_s / 2

    def next_wait_s(self, duration_s: float, most_s: float, *, is_lively: bool) -> float:
        """Return the seconds until the next check.

        duration_s  how long the last check took
        most_s      the longest wait allowed, whatever duration_s is
        is_lively   whether something has changed, or other nodes serve the volume
        """
        self._wait_s = self._least_s if is_lively else min(2 * self._wait_s, most_s)
        return min(max(self._wait_s, _WAIT_FACTOR * duration_s), most_s)
