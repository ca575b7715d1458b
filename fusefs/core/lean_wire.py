"""Messages between our own processes, as msgspec writes them: it knows no Enum of core/lean.py."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def encode(message: object) -> bytes:
    """Its JSON."""
    return msgspec.json.encode(message, enc_hook=lambda member: member.value)


def decode(text: bytes, kind: type[T]) -> T:
    """A message of that type. Raises  msgspec.MsgspecError"""
    return msgspec.json.decode(text, type=kind, dec_hook=member_of)


def member_of(kind: Any, value: object) -> object:
    """An Enum's member, for msgspec. Raises  ValueError"""
    return kind(value)
