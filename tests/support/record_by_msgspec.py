"""Records as msgspec reads them, which core/record_decoding.py is to be as strict as."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from fusefs.core.errors import BadRecord
from fusefs.core.identity import Identity
from fusefs.core.names import ContainerId, Name, RelPath, VolumeId, is_container_id, is_volume_id, join, split
from fusefs.core.record import (
    FORMAT,
    MAX_ENTERED,
    MAX_FAILURES,
    NOTE_MAX_CHARS,
    RECORD_MAX_BYTES,
    Entered,
    Failure,
    Invocation,
    KeptDirectory,
    Method,
    NewOwner,
    Record,
    TreeSize,
    unquote,
)

_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Ino = Annotated[int, msgspec.Meta(ge=0)]
_Mode = Annotated[int, msgspec.Meta(ge=0, le=0o7777)]
_Word = Annotated[str, msgspec.Meta(max_length=400)]


class _Identity(msgspec.Struct):
    handle: _Word
    ino: _Ino
    btime_ns: int


class _Heir(msgspec.Struct):
    uid: _Count
    retention_s: _Count | None


class _Failure(msgspec.Struct):
    name: str
    errno: _Count
    call: _Word


class _Invocation(msgspec.Struct):
    id: _Word
    session: _Word


class _Size(msgspec.Struct):
    n_entries: _Count | None
    n_bytes: _Count
    linked_bytes: _Count
    shared_bytes: _Count | None
    is_at_least: bool
    source: _Word
    at_ns: _Count


class _Record(msgspec.Struct):
    format: int
    id: _Word
    volume: _Word
    method: _Word
    origin: str | None
    parent: _Identity | None
    fresh: _Identity | None
    victim: _Identity | None
    host: _Word
    boot: _Word
    created_ns: _Count
    retention_s: _Count | None
    superblock: _Word = ""
    boot_ns: _Count | None = None
    note: Annotated[str, msgspec.Meta(max_length=NOTE_MAX_CHARS)] = ""
    lent_mode: _Mode | None = None
    lent_fresh: _Mode | None = None
    target: str | None = None
    heir: _Heir | None = None
    kept: dict[str, _Ino] | None = None
    moved_ns: _Count | None = None
    taken_from: _Count | None = None
    entered: Annotated[dict[_Word, _Count], msgspec.Meta(max_length=MAX_ENTERED)] = {}
    partial: bool = False
    failures: Annotated[list[_Failure], msgspec.Meta(max_length=MAX_FAILURES)] = []
    invocation: _Invocation | None = None
    size: _Size | None = None


class _Version(msgspec.Struct):
    format: int


def decode_by_msgspec(text: bytes) -> Record:
    """See core.record_decoding.decode."""
    if len(text) > RECORD_MAX_BYTES:
        raise BadRecord("larger than 64 KiB")
    try:
        version = msgspec.json.decode(text, type=_Version)
        if version.format != FORMAT:
            raise BadRecord(f"format {version.format}, this trashd knows {FORMAT}", "use a newer trashd")
        raw: dict[str, Any] = msgspec.json.decode(text)
        wire = msgspec.convert(raw, type=_Record)
        return _record(wire, raw)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadRecord(str(error)) from error


def _record(wire: _Record, raw: dict[str, Any]) -> Record:
    if not is_container_id(wire.id):
        raise ValueError("the id has not the form of an id")
    if not is_volume_id(wire.volume):
        raise ValueError("the volume's id has not the form of one")
    known, method = _Record.__struct_fields__, Method(wire.method)
    return Record(
        id=ContainerId(wire.id),
        volume=VolumeId(wire.volume),
        method=method,
        # Only a sweep may have been of the directory itself that holds the store.
        origin=RelPath(b"") if wire.origin == "" and method is Method.SWEEP else _path(wire.origin),
        parent=_identity(wire.parent),
        fresh=_identity(wire.fresh),
        victim=_identity(wire.victim),
        host=wire.host,
        boot=wire.boot,
        superblock=wire.superblock,
        boot_ns=wire.boot_ns,
        created_ns=wire.created_ns,
        retention_s=wire.retention_s,
        note=wire.note,
        lent_mode=wire.lent_mode,
        lent_fresh=wire.lent_fresh,
        target=_path(wire.target),
        heir=None if wire.heir is None else NewOwner(wire.heir.uid, wire.heir.retention_s),
        kept=None if wire.kept is None else tuple(KeptDirectory(_name(n), ino) for n, ino in wire.kept.items()),
        moved_ns=wire.moved_ns,
        taken_from=wire.taken_from,
        entered=tuple(Entered(*one) for one in wire.entered.items()),
        partial=wire.partial,
        failures=tuple(Failure(unquote(f.name), f.errno, f.call) for f in wire.failures),
        invocation=None if wire.invocation is None else Invocation(wire.invocation.id, wire.invocation.session),
        size=None if wire.size is None else TreeSize(*msgspec.structs.astuple(wire.size)),
        unknown=tuple((key, value) for key, value in raw.items() if key not in known),
    )


def _path(text: str | None) -> RelPath | None:
    return None if text is None else join(*split(unquote(text)))


def _name(text: str) -> Name:
    names = split(unquote(text))
    if len(names) != 1:
        raise ValueError("what is kept lies in the top of the tree")
    return names[0]


def _identity(wire: _Identity | None) -> Identity | None:
    return None if wire is None else Identity(wire.handle, wire.ino, wire.btime_ns)
