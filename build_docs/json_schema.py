"""Generates the JSON schema of the output of each command with --json, from the types that the command prints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import Enum
from functools import cache
from inspect import cleandoc
from types import GenericAlias, NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec

from fusefs.cli import json_objects as told
from fusefs.cli.holders import HeldTree
from fusefs.cli.init import RefusedFolders
from fusefs.cli.service import FileReport, ServiceInstalled
from fusefs.core.config import Config
from fusefs.core.errors import ConfigProblem
from fusefs.core.orphan_sums import OrphanSum, SumKey
from fusefs.core.policy import VolumePolicy
from fusefs.core.results import Finding, Reaped, Swept, Waited
from fusefs.core.service_status import Status
from fusefs.store.check_swap import Preflight
from fusefs.store.init_store import Initialised
from fusefs.store.orphan_contents import Difference, EntryInside
from fusefs.store.orphans import ListedContainer, PinnedOrphan
from fusefs.store.restore import Restored
from fusefs.store.swap import Swapped

JSON_VERSION = 2
"""Incremented when a key is removed, when its meaning changes, or when its value may have a different type."""
ERROR = "error"
"""The name of the objects that any command may print on standard error; no command has this name."""
_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_PROMISE = (
    "The objects that trashd prints with --json, one per line. $defs contains the objects of each command under its "
    "name, with - between words. Later versions may add keys, and values to enums; other changes increment `version`."
)


class PrintedObject(NamedTuple):
    """One kind of object, given by the types whose fields `output.as_json` prints together.

    without  a field that is not printed
    """

    parts: tuple[type, ...]
    without: str = ""


def _one(*parts: type, without: str = "") -> PrintedObject:
    return PrintedObject(parts, without)


@cache
def printed() -> dict[str, tuple[PrintedObject, ...]]:
    """Return the objects that each command prints, by the name of the command."""
    from fusefs.service.state_files import Pause

    restorable = _one(ListedContainer, told.RestorableFor)
    swapped, reaped, held, restored = _one(Swapped, told.UndoCommand), _one(Reaped), _one(HeldTree), _one(Restored)
    swept = (told.SweepAction, Swept, told.SweepOutcome)
    planned = (
        _one(told.PlannedRule, *swept, without="looks"),
        _one(told.RuleLeftUndone),
        _one(told.WrittenPurgeLists),
    )
    problem, file = _one(ConfigProblem), _one(FileReport)
    waited = _one(Waited)
    return {
        "swap": (swapped, reaped, _one(Preflight), waited),
        "rm": (swapped, reaped),
        "list": (restorable, _one(told.SummedBy, SumKey, OrphanSum)),
        "restore": (restored,),
        "undo": (restored,),
        "du": (_one(told.WhoseCount, told.KnownSize, told.CountEnd),),
        "ls": (_one(EntryInside),),
        "diff": (_one(Difference),),
        "keep": (_one(PinnedOrphan),),
        "reap": (reaped, _one(Reaped, told.KeptAs), restorable, waited),
        "check": (_one(Preflight),),
        "holders": (held,),
        "sweep": (_one(*swept, without="looks"), _one(told.SweepMatch)),
        "plan show": planned,
        "plan apply": planned,
        "plan check": (problem,),
        "status": (_one(told.ServiceLife, Status), _one(told.MountsSeen)),
        "doctor": (_one(Finding),),
        "init": (_one(Initialised, RefusedFolders),),
        "mount": (_one(told.MountExplained),),
        "umount": (_one(told.UnmountedPath),),
        "service install": (file,),
        "service status": (_one(ServiceInstalled),),
        "service uninstall": (file,),
        "pause": (_one(told.PausedVolume, Pause),),
        "resume": (_one(told.PausedVolume),),
        "config check": (problem,),
        "config show": (_one(Config), _one(VolumePolicy)),
        ERROR: (_one(told.ErrorTold), problem),
    }


def schema() -> dict[str, Any]:
    """Return the schema for all commands and for errors."""
    objects = {one: _struct(one) for several in printed().values() for one in several}
    references, components = msgspec.json.schema_components(list(objects.values()), ref_template="#/$defs/{name}")
    for component in components.values():
        if "description" in component:
            component["description"] = cleandoc(component["description"])  # msgspec before 0.23 leaves it indented
    by_object = dict(zip(objects, references, strict=True))
    commands = {
        definition_of(command): _any_of([by_object[one] for one in several]) for command, several in printed().items()
    }
    head = {"$schema": _DIALECT, "title": "trashd --json", "version": JSON_VERSION, "description": _PROMISE}
    return {**head, "$defs": {**commands, **dict(sorted(components.items()))}}


def definition_of(command: str) -> str:
    """Return the name of a command's objects in `$defs`."""
    return command.replace(" ", "-")


def text() -> str:
    """Return the text of docs/json.schema.json."""
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


def _any_of(references: list[dict[str, Any]]) -> dict[str, Any]:
    return references[0] if len(references) == 1 else {"anyOf": references}


@cache
def _struct(printed_object: PrintedObject) -> type[msgspec.Struct]:
    """Make a type for msgspec with the fields that `output.as_json` prints. No default exists: all are required."""
    parts, without = printed_object
    fields = {name: kind for part in parts for name, kind in _fields(part) if name != without}
    sentences = " ".join((part.__doc__ or "").partition("\n")[0] for part in parts)
    name = "".join(part.__name__ for part in parts)
    return msgspec.defstruct(name, list(fields.items()), namespace={"__doc__": sentences})


def _fields(part: type) -> Iterator[tuple[str, Any]]:
    hints = get_type_hints(part)
    names = part.__struct_fields__ if issubclass(part, msgspec.Struct) else part._fields  # type: ignore[attr-defined]
    return ((name, _as_printed(hints[name])) for name in names)


def _as_printed(kind: Any) -> Any:
    """Return the type of a value after `output.plain` has converted it."""
    arguments = tuple(one if one is Ellipsis else _as_printed(one) for one in get_args(kind))
    match get_origin(kind):
        case None:
            return _plain(kind)
        case origin if origin in (Union, UnionType):
            return Union[arguments]  # noqa: UP007  there is no other way to make a union from a tuple
        case origin:
            return GenericAlias(origin, arguments)


@cache
def _enum(kind: Any) -> type[Enum]:
    """Make a standard enum for msgspec with the members of an enum of either kind."""
    make: Any = Enum
    made: type[Enum] = make(kind.__name__, {one.name: one.value for one in kind})
    made.__doc__ = kind.__doc__
    return made


def _plain(kind: Any) -> Any:
    if hasattr(kind, "__supertype__"):
        return _as_printed(kind.__supertype__)
    if kind is bytes:
        return str
    if kind is NoneType or not isinstance(kind, type):
        return kind
    if hasattr(kind, "_value2member_map_"):
        return _enum(kind)
    is_object = issubclass(kind, msgspec.Struct) or (issubclass(kind, tuple) and hasattr(kind, "_fields"))
    return _struct(PrintedObject((kind,))) if is_object else kind
