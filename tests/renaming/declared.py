"""What the product's classes and tables tell the world: errors, enums, encoded structs, metrics, events, help."""

from __future__ import annotations

import errno
import importlib
import pkgutil
from collections.abc import Iterator
from enum import Enum
from typing import Any

import click
import msgspec
from click.shell_completion import BashComplete

import fusefs
from fusefs.cli.group import trashd
from fusefs.core.errors import TrashdError
from fusefs.core.events import Event, EventKind, describe, encode, variables
from fusefs.core.mount_counters import CounterTable, SeenMount, decode
from fusefs.core.mount_counters import encode as encode_stats
from fusefs.core.service_status import Status, VolumeStatus
from fusefs.mount.mount_metrics import prometheus_text
from fusefs.service.hooks import HookCounts
from fusefs.service.prometheus import PrometheusMetrics

_WIDTH = 80


def import_all() -> None:
    """Import every module of the product: a class is known when its module is."""
    for module in pkgutil.walk_packages(fusefs.__path__, "fusefs."):
        importlib.import_module(module.name)


def errors() -> str:
    """Every kind of error by the name that JSON has of it: message, exit code, errno and hint."""
    lines = []
    for kind in sorted((TrashdError, *_below(TrashdError)), key=lambda kind: kind.__name__):
        text = (kind.__doc__ or "").partition("\n")[0]
        number = errno.errorcode.get(kind.errno, str(kind.errno))
        bases = ", ".join(base.__name__ for base in kind.__mro__[1:] if base.__module__.startswith("fusefs"))
        lines.append(f"{kind.__name__} ({bases})\n  {text}\n  exit {kind.exit_code}, {number}\n  hint: {kind.hint}\n")
    return "".join(lines)


def enums() -> str:
    """The values of each enumeration, in their order; what the code calls it and them is its own affair."""
    return _sorted(
        f"{kind.__mro__[1].__name__}: {', '.join(repr(member.value) for member in kind)}"
        for kind in _below(Enum)
        if len(kind)
    )


def structs() -> str:
    """What is encoded: each struct's tag, and its fields with their types and defaults, in their order."""
    return _sorted(_struct(kind, msgspec.inspect.type_info(kind)) for kind in _below(msgspec.Struct))


def tuples() -> str:
    """The fields of each named tuple: some of them are keys of JSON."""
    return _sorted(", ".join(kind._fields) for kind in _below(tuple) if hasattr(kind, "_fields"))


def metrics() -> str:
    """The metrics of service and mounts with help, type and labels, of a volume and a mount of which all is known."""
    known = VolumeStatus(
        path="/v", tempo_entries_per_s=100, io=0.25, memory=0.0, cpu=0.5, probe_ms=2.0, unlink_us=20.0, eta_s=60.0,
        oldest_overdue_s=7.0, free_bytes=10, total_bytes=100, free_inodes=4, total_inodes=8,
    )  # fmt: skip
    own = VolumeStatus(path="/h", owner=1000, n_orphans=2, n_due=1, freed_bytes=5)
    of_service = PrometheusMetrics()
    for kind in EventKind:
        of_service(Event(kind, 0, b"/v", 1000))
    of_service(Event(EventKind.REAPED, 0, b"/h", 1000), is_own=True)
    of_service.publish(
        Status(version="1", pid=2, boot_id="b", started_ns=3, updated_ns=4, volumes=(known, own)), HookCounts()
    )
    lines = [
        f"{family.name} {family.type} {family.unit} {family.documentation}\n"
        + "".join(f"  {sample.name} {sample.labels} {sample.value}\n" for sample in family.samples)
        for family in of_service.collect()
    ]
    blank = bytearray(encode_stats(CounterTable(version="1", pid=2, started_ns=3)))
    blank[-8:] = (1).to_bytes(8, "little")
    return "".join(lines) + prometheus_text([SeenMount(b"/mnt", b"/src", decode(blank), is_running=True)])


def events() -> str:
    """The audit log's lines, the log's own, and a hook's variables with the journal's fields, of each kind of event."""
    lines = []
    for kind in EventKind:
        known = Event(
            kind, 1_700_000_000_123_456_789, b"/v\xff", 1000, "an-id", b"/v/job\n", 12345, 1 << 30, 2.5, "why"
        )
        for event in (known, Event(kind, 0)):
            lines += [encode(event).decode(), describe(event), *(f"  {k}={v!r}" for k, v in variables(event).items())]
    return "".join(f"{line}\n" for line in lines)


def helps() -> str:
    """Every command's help, hidden ones too, with what a shell is offered for it."""
    return "".join(_helps(trashd, _context(trashd, "trashd", None)))


def _helps(command: click.Command, context: click.Context) -> Iterator[str]:
    hidden = " (hidden)" if command.hidden else ""
    yield f"=== {context.command_path}{hidden}\n{command.get_help(context)}\n"
    words = context.command_path.split()
    for typed in ("", "-"):
        shell = BashComplete(trashd, {}, "trashd", "_TRASHD_COMPLETE")
        offered = (f"{item.type},{item.value}" for item in shell.get_completions(words[1:], typed))
        yield f"--- completion of {typed!r}: {' '.join(offered)}\n"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from _helps(inner, _context(inner, name, context))


def _context(command: click.Command, name: str, parent: click.Context | None) -> click.Context:
    how = {**command.context_settings, "terminal_width": _WIDTH, "max_content_width": _WIDTH}
    return click.Context(command, info_name=name, parent=parent, **how)


def _below(top: type[Any]) -> set[Any]:
    """The product's classes that are made of one, at whatever remove."""
    found: set[Any] = set()
    kinds: list[Any] = type.__subclasses__(top)
    for kind in kinds:
        found |= {kind} if kind.__module__.startswith("fusefs.") else set()
        found |= _below(kind)
    return found


def _sorted(lines: Iterator[str]) -> str:
    return "".join(f"{line}\n" for line in sorted(lines))


def _struct(kind: type[msgspec.Struct], shape: msgspec.inspect.Type) -> str:
    config = kind.__struct_config__
    named = "" if config.tag is None else f"{config.tag_field}={_tag(kind, config.tag)} "
    return f"{named}array={config.array_like} strict={config.forbid_unknown_fields} {_shape(shape)}"


def _tag(kind: type, tag: str | int) -> str:
    """A tag that is the class's name goes between processes of one service only, and changes with that."""
    return "its name" if tag == kind.__name__ else repr(tag)


def _shape(value: object) -> str:
    """A type as the wire has it: a struct or an enumeration by what is in it, not by what the code calls it."""
    match value:
        case msgspec.inspect.StructType(fields=fields):
            return "{" + ", ".join(map(_field, fields)) + "}"
        case msgspec.inspect.EnumType(cls=cls):
            return f"one of {[member.value for member in cls]}"
        case msgspec.inspect.NamedTupleType(fields=fields):
            return "(" + ", ".join(map(_field, fields)) + ")"
        case msgspec.inspect.Type():
            parts = [(name, getattr(value, name)) for name in value.__struct_fields__]
            inner = ", ".join(f"{name}={_shape(part)}" for name, part in parts if part is not None)
            return f"{type(value).__name__.removesuffix('Type').lower()}({inner})"
        case tuple():
            return " | ".join(map(_shape, value))
    return repr(value)


def _field(field: msgspec.inspect.Field) -> str:
    default: object = "" if field.required else "=factory"
    if field.default is not msgspec.NODEFAULT:
        default = f"={_default(field.default)}"
    return f"{field.encode_name}: {_shape(field.type)}{default}"


def _default(value: object) -> str:
    if isinstance(value, Enum):
        return repr(value.value)
    return repr(bytes(value)) if isinstance(value, msgspec.Raw) else repr(value)
