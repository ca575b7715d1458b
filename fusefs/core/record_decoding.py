"""Decodes records: turns bytes that a user may have written into a Record, or raises an error."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from fusefs.core.errors import BadRecord
from fusefs.core.identity import Identity
from fusefs.core.names import ContainerId, Name, RelPath, VolumeId, is_container_id, is_volume_id, join_path, split_path
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
    unquote_path,
)

_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Ino = Annotated[int, msgspec.Meta(ge=0)]
_Mode = Annotated[int, msgspec.Meta(ge=0, le=0o7777)]
_ShortText = Annotated[str, msgspec.Meta(max_length=400)]


class _Identity(msgspec.Struct):
    handle: _ShortText
    ino: _Ino
    btime_ns: int


class _Heir(msgspec.Struct):
    uid: _Count
    retention_s: _Count | None


class _Failure(msgspec.Struct):
    name: str
    errno: _Count
    call: _ShortText


class _Invocation(msgspec.Struct):
    id: _ShortText
    session: _ShortText


class _Size(msgspec.Struct):
    n_entries: _Count | None
    n_bytes: _Count
    linked_bytes: _Count
    shared_bytes: _Count | None
    is_at_least: bool
    source: _ShortText
    at_ns: _Count


class _Record(msgspec.Struct, forbid_unknown_fields=True):
    format: int
    id: _ShortText
    volume: _ShortText
    method: Method
    origin: str | None
    parent: _Identity | None
    fresh: _Identity | None
    victim: _Identity | None
    host: _ShortText
    boot: _ShortText
    created_ns: _Count
    retention_s: _Count | None
    superblock: _ShortText = ""
    boot_ns: _Count | None = None
    note: Annotated[str, msgspec.Meta(max_length=NOTE_MAX_CHARS)] = ""
    lent_mode: _Mode | None = None
    lent_fresh: _Mode | None = None
    target: str | None = None
    heir: _Heir | None = None
    kept: dict[str, _Ino] | None = None
    moved_ns: _Count | None = None
    taken_from: _Count | None = None
    entered: Annotated[dict[_ShortText, _Count], msgspec.Meta(max_length=MAX_ENTERED)] = {}
    partial: bool = False
    failures: Annotated[list[_Failure], msgspec.Meta(max_length=MAX_FAILURES)] = []
    invocation: _Invocation | None = None
    size: _Size | None = None
    parts: list[str] = []


class _Version(msgspec.Struct):
    format: int


_DECODER = msgspec.json.Decoder(_Record)


def decode_record(text: bytes) -> Record:
    """Decode the bytes of a record.json.

    Raises  BadRecord for anything else: another format, a wrong type, a path that leads outside, too many bytes
    """
    if len(text) > RECORD_MAX_BYTES:
        raise BadRecord("it is larger than 64 KiB")
    try:
        try:
            wire = _DECODER.decode(text)
        except msgspec.ValidationError:
            return _decode_with_unknown(text)
        _check_format(wire.format)
        return _to_record(wire, ())
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadRecord(str(error)) from error


def _decode_with_unknown(text: bytes) -> Record:
    """Decode a record that may have keys of a later version; this takes twice as long as `decode_record`.

    Raises  BadRecord, msgspec.MsgspecError, ValueError
    """
    raw: dict[str, Any] = msgspec.json.decode(text)
    _check_format(msgspec.convert(raw, type=_Version).format)
    known_keys = _Record.__struct_fields__
    unknown = tuple((key, raw.pop(key)) for key in [*raw] if key not in known_keys)
    return _to_record(msgspec.convert(raw, type=_Record), unknown)


def _check_format(found: int) -> None:
    if found != FORMAT:
        raise BadRecord(f"format {found} (this version reads format {FORMAT})", "use a newer version of trashd")


def _to_record(wire: _Record, unknown: tuple[tuple[str, Any], ...]) -> Record:
    """Raises  ValueError if an ID is malformed or a path is not plain"""
    if not (is_container_id(wire.id) and is_volume_id(wire.volume)):
        raise ValueError("invalid ID")
    # Only a sweep's origin may be the directory that holds the store.
    is_of_store = wire.origin == "" and wire.method is Method.SWEEP
    return Record(
        id=ContainerId(wire.id),
        volume=VolumeId(wire.volume),
        method=wire.method,
        origin=RelPath(b"") if is_of_store else _path(wire.origin),
        parent=_to_tuple(Identity, wire.parent),
        fresh=_to_tuple(Identity, wire.fresh),
        victim=_to_tuple(Identity, wire.victim),
        host=wire.host,
        boot=wire.boot,
        created_ns=wire.created_ns,
        retention_s=wire.retention_s,
        superblock=wire.superblock,
        boot_ns=wire.boot_ns,
        note=wire.note,
        lent_mode=wire.lent_mode,
        lent_fresh=wire.lent_fresh,
        target=_path(wire.target),
        heir=_to_tuple(NewOwner, wire.heir),
        kept=None if wire.kept is None else tuple(KeptDirectory(_name(name), ino) for name, ino in wire.kept.items()),
        moved_ns=wire.moved_ns,
        taken_from=wire.taken_from,
        entered=tuple(Entered(*one) for one in wire.entered.items()),
        partial=wire.partial,
        failures=tuple(Failure(unquote_path(one.name), one.errno, one.call) for one in wire.failures),
        invocation=_to_tuple(Invocation, wire.invocation),
        size=_to_tuple(TreeSize, wire.size),
        parts=tuple(join_path(*split_path(unquote_path(part))) for part in wire.parts),
        unknown=unknown,
    )


def _to_tuple(kind: Any, wire: msgspec.Struct | None) -> Any:
    return None if wire is None else kind._make(msgspec.structs.astuple(wire))


def _path(text: str | None) -> RelPath | None:
    if text is None:
        return None
    split_path(path := unquote_path(text))  # raises ValueError unless the path is plain
    return RelPath(path)


def _name(text: str) -> Name:
    names = split_path(unquote_path(text))
    if len(names) != 1:
        raise ValueError("an entry kept by swap --keep must be at the top level of the directory")
    return names[0]
