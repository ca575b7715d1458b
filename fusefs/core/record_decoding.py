"""Records read back: bytes that a user may have written, turned into a Record or an error."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from fusefs.core.errors import BadRecord
from fusefs.core.identity import Identity
from fusefs.core.names import Name, RelPath, is_container_id, is_volume_id, join, split
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
    """The fields of a Record as JSON has them."""

    format: int
    id: _Word
    volume: _Word
    method: Method
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
    parts: list[str] = []


class _Version(msgspec.Struct):
    format: int


def decode(text: bytes) -> Record:
    """The Record in the bytes of a record.json.

    Raises  BadRecord for anything else: another format, a wrong type, a path that climbs, too many bytes
    """
    if len(text) > RECORD_MAX_BYTES:
        raise BadRecord("larger than 64 KiB")
    try:
        raw: dict[str, Any] = msgspec.json.decode(text)
        version = msgspec.convert(raw, type=_Version).format
        if version != FORMAT:
            raise BadRecord(f"format {version}, this trashd knows {FORMAT}", "use a newer trashd")
        return _to_record(msgspec.convert(raw, type=_Record), raw)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadRecord(str(error)) from error


def _to_record(wire: _Record, raw: dict[str, Any]) -> Record:
    """Raises  ValueError: an id has not its form, a path is not plain"""
    if not (is_container_id(wire.id) and is_volume_id(wire.volume)):
        raise ValueError("an id has not the form of an id")
    fields = msgspec.structs.asdict(wire)
    del fields["format"]
    # Only a sweep may have been of the directory itself that holds the store.
    is_of_store = wire.origin == "" and wire.method is Method.SWEEP
    fields["origin"] = RelPath(b"") if is_of_store else _path(wire.origin)
    fields["target"] = _path(wire.target)
    for key in ("parent", "fresh", "victim"):
        fields[key] = _made(Identity, fields[key])
    fields["heir"] = _made(NewOwner, wire.heir)
    fields["invocation"] = _made(Invocation, wire.invocation)
    fields["size"] = _made(TreeSize, wire.size)
    fields["entered"] = tuple(Entered(*one) for one in wire.entered.items())
    fields["failures"] = tuple(Failure(unquote(one.name), one.errno, one.call) for one in wire.failures)
    fields["parts"] = tuple(join(*split(unquote(part))) for part in wire.parts)
    if wire.kept is not None:
        fields["kept"] = tuple(KeptDirectory(_name(name), ino) for name, ino in wire.kept.items())
    known = _Record.__struct_fields__
    return Record(**fields, unknown=tuple((key, value) for key, value in raw.items() if key not in known))


def _made(kind: Any, wire: msgspec.Struct | None) -> Any:
    return None if wire is None else kind(*msgspec.structs.astuple(wire))


def _path(text: str | None) -> RelPath | None:
    return None if text is None else join(*split(unquote(text)))


def _name(text: str) -> Name:
    names = split(unquote(text))
    if len(names) != 1:
        raise ValueError("what is kept lies in the top of the tree")
    return names[0]
