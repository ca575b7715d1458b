"""Beats of the nodes that serve a volume: what one says, and which of them live by the watcher's own clock; pure.

A beat only says who may be alive. Nothing is decided by it but how often to look for what others did, and what people
are told: who removes a tree is who claimed it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, NamedTuple

import msgspec

from fusefs.core.service_status import SeenNode

BEAT_S = 30.0
SILENT_S = 3 * BEAT_S
"""A beat that was not seen to change for so long is no sign of life any more."""
FORGOTTEN_S = 3 * 86_400.0
"""So long after its node was seen last, a beat is removed: over a weekend people see who is missing."""
BEAT_BYTES = 512
"""Each has this size, whatever it says: it is written in place by one call, and needs no new block."""
LEAST_POLL_S = 10.0
"""Between two looks for what other nodes did."""
_N_RESTS = 20
"""Such a look is followed by so many times as long without one."""
_MOST_AT_ONCE_S = 2 * BEAT_S
"""Between two looks no more time than that is counted: whoever was frozen has seen nobody silent meanwhile."""
_HOST_CHARS = 64
_NAME = re.compile(rb"([A-Za-z0-9_-][A-Za-z0-9._-]{0,63})\.([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})")
_Word = Annotated[str, msgspec.Meta(max_length=_HOST_CHARS)]


class NodeBeat(msgspec.Struct, frozen=True, kw_only=True):
    """What a service says of itself.

    started_ns  wall time when it began; with `n` it tells one beat from the next
    n           beats since then
    phase       what it does on this volume
    probe_ms    how long small durable writes take there, as seen from this node; None: not known
    """

    started_ns: int
    n: int
    version: _Word
    phase: _Word
    probe_ms: float | None = None


def beat_name(host: str, boot_id: str) -> bytes:
    """The name of a node's beat: its host name, as far as it is plain, and its boot."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", host)[:_HOST_CHARS].lstrip(".") or "_"
    return f"{plain}.{boot_id}".encode("ascii")


def is_beat_name(name: bytes) -> bool:
    """Whether `beat_name` makes such names."""
    return _NAME.fullmatch(name) is not None


def encode_beat(beat: NodeBeat) -> bytes:
    """A beat's bytes: JSON and blanks."""
    return msgspec.json.encode(beat).ljust(BEAT_BYTES - 1) + b"\n"


def decode_beat(text: bytes) -> NodeBeat | None:
    """What `encode_beat` wrote; None for anything else, as for what is being written."""
    try:
        return msgspec.json.decode(text, type=NodeBeat)
    except (msgspec.MsgspecError, ValueError):
        return None


class _Watched(NamedTuple):
    """A beat as it was seen last.

    unchanged_s  how long it was watched since it changed, or since it was seen first
    has_changed  whether it was seen to change
    """

    beat: NodeBeat | None
    unchanged_s: float = 0.0
    has_changed: bool = False


class BeatWatch:
    """What one watcher saw of all beats of a volume. Its time is its own, in seconds that never go back."""

    def __init__(self) -> None:
        self._watched: dict[bytes, _Watched] = {}
        self._looked_s: float | None = None

    def look(self, beats: Mapping[bytes, NodeBeat | None], now_s: float) -> set[bytes]:
        """Take in what all beats say now (None: not understood); the nodes that lived until now, and don't any more."""
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
        """The nodes whose beats were seen to change, lately."""
        return {name for name, one in self._watched.items() if _lives(one)}

    def forgotten(self) -> list[bytes]:
        """Those that have not changed for so long that they only stand in the way."""
        return [name for name, one in self._watched.items() if one.unchanged_s >= FORGOTTEN_S]

    def told(self, own: bytes | None) -> tuple[SeenNode, ...]:
        """All nodes, for people. own: our own name, if we have a beat"""
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
    """How long until the next look for what other nodes did: soon while something happens, ever later while nothing."""

    def __init__(self, least_s: float = LEAST_POLL_S) -> None:
        """least_s: between two looks, at least."""
        self._least_s = least_s
        self._wait_s = least_s / 2

    def after(self, took_s: float, most_s: float, *, is_lively: bool) -> float:
        """Seconds until the next look.

        took_s     how long this one took
        most_s     the longest that is allowed, whatever it took
        is_lively  whether something has changed, or other nodes serve the volume
        """
        self._wait_s = self._least_s if is_lively else min(2 * self._wait_s, most_s)
        return min(max(self._wait_s, _N_RESTS * took_s), most_s)
