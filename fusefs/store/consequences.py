"""What follows for users from what a volume's filesystem was seen to do, in sentences: `trashd check`, `init`."""

from __future__ import annotations

from typing import NamedTuple

from fusefs.store.layout import Volume

SILENCE_S = 90.0
_CACHE_TIMES = 3
_ASK = "trashd init --beside PATH VOLUME tells, PATH being a second mount of it"
_MS = 1_000_000


class Consequence(NamedTuple):
    """about: a word; text: the sentence."""

    about: str
    text: str


def takeover_s(volume: Volume) -> float:
    """How long another node's command has to be silent before it is taken over, if its lock can be had.

    A node that says nothing for less may have been busy; and three times as long as what it writes may be unseen.
    """
    return max(SILENCE_S, _CACHE_TIMES * (volume.cache_s or 0.0))


def consequences(volume: Volume, *, is_shared: bool, gap_ns: int | None = None) -> tuple[Consequence, ...]:
    """What follows; nothing where one kernel has the filesystem, and it can exchange.

    is_shared  other machines may have it mounted
    gap_ns     for how long a name was missing when two renames were tried
    """
    told: list[tuple[str, str]] = []
    if not volume.exchange:
        told += _of_two_renames(volume, gap_ns)
    if is_shared:
        told += [_of_caches(volume), _of_locks(volume), _of_reaping(), *_of_identities(volume)]
    return tuple(Consequence(*one) for one in told)


def _of_two_renames(volume: Volume, gap_ns: int | None) -> list[tuple[str, str]]:
    tried = "" if gap_ns is None else f", {gap_ns / _MS:.2f} ms when it was tried just now"
    told = [("gap", f"between two renames the name is missing{tried}: who opens it then is told ENOENT")]
    how = "" if volume.noreplace else " (no rename spares a taken name here, so mkdir takes it before)"
    return [*told, ("taken", f"who makes something of that name meanwhile keeps it{how}; the old tree is an orphan")]


def _of_caches(volume: Volume) -> tuple[str, str]:
    if volume.cache_s is None:
        until = "how long other nodes go on seeing the old directory after a swap is not known"
        return "caches", f"{until}: {_ASK}; what they write there meanwhile is in the orphan"
    until = f"for up to {volume.cache_s:.3g} s after a swap other nodes see the old directory"
    return "caches", f"{until}, and what they write there meanwhile is in the orphan"


def _of_locks(volume: Volume) -> tuple[str, str]:
    if volume.shared_locks:
        text = (
            "nodes see each other's locks: what another one's dead command left waits, as a node that was cut off loses"
        )
        return "locks", f"{text} its locks, for {takeover_s(volume):g} s of silence"
    is_known = volume.shared_locks is False
    why = "nodes don't see each other's locks" if is_known else "whether nodes see each other's locks is not known"
    text = f"{why}: what a dead command of another one left waits for {takeover_s(volume):g} s of silence"
    return "locks", text if is_known else f"{text}; {_ASK}"


def _of_reaping() -> tuple[str, str]:
    return "reaping", "what a reaper has begun on can't be restored any more, nor what it could not delete: copy it out"


def _of_identities(volume: Volume) -> list[tuple[str, str]]:
    if volume.handles is False and volume.birth_times is False:
        text = "neither file handles nor birth times tell the same on two nodes: what can't be told apart is kept"
        return [("identity", text)]
    return []
