"""Messages between our own processes, as msgspec writes them: it knows no Enum of core/lean.py.

A command that acts for nobody else has none, and does not load it.
"""

from __future__ import annotations

from fusefs.core.lean import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from typing import Any

T = TypeVar("T")


def load() -> None:
    """Have it loaded before processes are forked that need it too, each of which would do so by itself."""
    import msgspec.json  # noqa: F401


def encode(message: object) -> bytes:
    """Its JSON, in one line."""
    from msgspec.json import encode as written

    return written(message, enc_hook=lambda member: member.value)


def decode(text: bytes, kind: type[T]) -> T:
    """A message of that type. Raises  ValueError"""
    from msgspec import MsgspecError
    from msgspec.json import decode as read

    try:
        return read(text, type=kind, dec_hook=member_of)
    except MsgspecError as error:
        raise ValueError(str(error)) from error


def member_of(kind: Any, value: object) -> object:
    """An Enum's member, for msgspec. Raises  ValueError"""
    return kind(value)
