"""Plans: reads TOML into rules, or reports every problem with its file, key and fix; and the results of the rules."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from fusefs.core import selection, toml_reader
from fusefs.core.container_states import DEFAULT_RETENTION_S
from fusefs.core.errors import BadConfig, ConfigProblem, TrashdError
from fusefs.core.glob import compile_glob
from fusefs.core.human_units import SECOND_NS, CivilTime, is_file_time, parse_time
from fusefs.core.results import Swept
from fusefs.core.selection import DEVICES, DIRECTORY, KINDS, TIMES, Field, Selection, SizeBound, TimeBound
from fusefs.core.toml_reader import (
    ConfigKey,
    Document,
    RemovedKey,
    Schema,
    SettingsBuilder,
    SettingsReader,
    Source,
    ValueKind,
    read_document,
    read_tables,
)

_SPAN = re.compile(r"(?:[0-9]+[smhdw])+", re.ASCII)


class TrashAction(NamedTuple):
    """Trash matches. keep_for_s: how long they can be restored"""

    keep_for_s: int = DEFAULT_RETENTION_S


class DeleteAction(NamedTuple):
    """Delete matches at once."""


class MoveAction(NamedTuple):
    """Move matches into a directory; see sweep.request.ToMove."""

    target: bytes
    if_exists: str = "skip"


class PurgeNotice(NamedTuple):
    """Purge lists of the files that will expire within a period: for each user, a list that only this user can read."""

    directory: bytes
    ahead_s: int


class RuleAge(NamedTuple):
    """A condition on age: an entry is old if all its times in these fields are before `before_ns`."""

    fields: tuple[Field, ...]
    before_ns: int


class Rule(NamedTuple):
    """A selection of entries, and the action on them.

    place      the rule's place in its file
    directory  an absolute path, which may contain wildcards, as in a shell
    selection  which entries in the directory to select
    age        the age condition, if any
    is_unit    the directory's own entries are units: each is taken as a whole if everything in it is old. Otherwise
               entries at any depth are selected one by one, and `selection` contains the age condition
    most       maximum number of matches; None: unlimited
    trusts_atime  use access times even if the mount doesn't update them
    """

    place: ConfigKey
    directory: bytes
    selection: Selection
    action: TrashAction | DeleteAction | MoveAction = TrashAction()
    age: RuleAge | None = None
    is_unit: bool = False
    most: int | None = None
    purge: PurgeNotice | None = None
    trusts_atime: bool = False

    def times(self) -> tuple[TimeBound, ...]:
        """Return all conditions on times, including those of units."""
        age = RuleAge((), 0) if self.age is None else self.age
        return (*self.selection.times, *(TimeBound(field, before_ns=age.before_ns) for field in age.fields))

    def uses_directory_times(self) -> bool:
        """Whether the rule uses the times of directories, if only of empty ones."""
        return self.is_unit or self.selection.empty

    def upcoming_selection(self) -> Selection:
        """Return the selection with the times that it will have at the end of the purge list's period."""
        ahead_ns = 0 if self.purge is None else self.purge.ahead_s * SECOND_NS
        times = self.selection.times
        later = [b if b.before_ns is None else b._replace(before_ns=b.before_ns + ahead_ns) for b in times]
        return self.selection._replace(times=tuple(later))


class RuleResult(NamedTuple):
    """The result of a rule in one directory."""

    rule: Rule
    swept: Swept


class SkippedRule(NamedTuple):
    """A directory in which a rule did nothing, and why. error: the error, if the rule should have done something"""

    rule: Rule
    directory: bytes
    why: str
    error: TrashdError | None = None


class PurgeListsResult(NamedTuple):
    """The present purge lists in one directory. error: why they are still the previous ones; None: they are new

    is_whole  False if entries could not be read and are missing; the lists then state that
    """

    directory: bytes
    n_users: int
    n_entries: int
    error: TrashdError | None = None
    is_whole: bool = True


RuleOutcome = RuleResult | SkippedRule | PurgeListsResult


class PlanContext(NamedTuple):
    """The time, the users and the callbacks that are needed to read a plan.

    now_ns            wall time, to which ages are relative
    local_s           see human_units.parse_time
    cutoff_ns         see human_units.parse_time; for `older`
    uid_of, gid_of    convert names to numbers; raise ValueError with a message for an unknown user or group
    warn              called for each key that no longer has an effect
    """

    now_ns: int
    local_s: Callable[[CivilTime], float]
    uid_of: Callable[[str], int]
    gid_of: Callable[[str], int]
    cutoff_ns: Callable[[int], int] | None = None
    warn: Callable[[ConfigProblem], None] = lambda _warning: None


def _fields(raw: Any) -> tuple[str, ...]:
    fields = toml_reader.read_texts(raw)
    if not fields or not set(fields) <= set(TIMES):
        raise ValueError(raw)
    return fields


def _directories(raw: Any) -> bytes:
    path = toml_reader.read_path(raw)
    if path == b"/":
        raise ValueError(raw)
    for name in path.decode().split("/")[1:]:
        compile_glob(name)
    return path


DIRECTORIES: Final = ValueKind(
    "an absolute path below /, perhaps with wildcards",
    'write a path such as "/scratch" or "/home/*/tmp", without `..`', _directories,
    str,
)  # fmt: skip
RULE: Schema = {
    "directory": DIRECTORIES,
    "name": toml_reader.TEXT,
    "iname": toml_reader.TEXT,
    "path": toml_reader.TEXT,
    "regex": toml_reader.TEXT,
    "exclude": toml_reader.TEXTS,
    "type": toml_reader.TEXTS,
    "size": toml_reader.TEXTS,
    "older": toml_reader.TEXT,
    "newer": toml_reader.TEXT,
    "by": ValueKind(
        "a time, or a list of times",
        'write "mtime", "atime", "ctime" or "btime", or a list such as ["atime", "mtime"]',
        _fields,
        str,
    ),
    "trusts_atime": toml_reader.FLAG,
    "user": toml_reader.NUMBER_OR_TEXT,
    "group": toml_reader.NUMBER_OR_TEXT,
    "empty": toml_reader.FLAG,
    "depth": toml_reader.NUMBER_OR_TEXT._replace(
        name="a depth", fix='write, for example, 2 for at most two levels, or "2..3"'
    ),
    "unit": toml_reader.one_of("top"),
    "action": toml_reader.one_of("trash", "delete", "move"),
    "keep_for": toml_reader.DURATION,
    "move_to": toml_reader.PATH,
    "if_exists": toml_reader.one_of("skip", "number", "replace"),
    "flat": RemovedKey("remove the key; a rule that moves files keeps their directory structure"),
    "copy": RemovedKey("remove the key; a move to another filesystem is refused, with an rsync command as the hint"),
    "max_delete": toml_reader.POSITIVE,
    "purgelist": {"directory": toml_reader.PATH, "ahead": toml_reader.TIME_LIMIT},
}
_OF_MOVE = ("move_to", "if_exists")
_NOT_OF_UNITS = ("size", "newer", "empty", "depth")
_NARROWS = ("name", "iname", "path", "regex", "size", "older", "newer", "user", "group", "empty")


def read_plan(sources: Sequence[Source], context: PlanContext) -> tuple[Rule, ...]:
    """Read the rules of all sources, in order.

    Raises  BadConfig with all problems that were found
    """
    problems: list[ConfigProblem] = []
    rules: list[Rule] = []
    for source in sources:
        document = read_document(source, problems, "trashd-plan(5)")
        problems += _unknown_keys(document)
        for table in read_tables(document, "rule", RULE, problems):
            rule = _RuleBuilder(table, context, problems).build()
            if rule is not None:
                rules.append(rule)
    problems += _check_purge_lists(rules)
    if not all(problem.is_warning for problem in problems):
        raise BadConfig(
            hint="trashd plan check PLAN lists all errors; trashd-plan(5) describes the keys", problems=tuple(problems)
        )
    for warning in problems:
        context.warn(warning)
    return tuple(rules)


def _unknown_keys(document: Document) -> Iterator[ConfigProblem]:
    """Yield a problem for each key outside rules."""
    for key in document.tree:
        if key != "rule":
            fix = (
                "a plan contains only rules: write [[rule]] above each one"
                if key in RULE
                else "the only table is [[rule]]"
            )
            yield document.place(key).problem("unknown key", fix)


def _check_purge_lists(rules: Sequence[Rule]) -> Iterator[ConfigProblem]:
    """Yield a problem for purge lists in a directory that a rule sweeps, since the rule could remove the lists."""
    for rule in rules:
        for other in rules:
            if rule.purge is not None and _matches_or_contains(other.directory, rule.purge.directory):
                what = f"its purgelist is in a directory that the rule at {other.place} sweeps"
                yield rule.place.problem(what, "name a directory that no rule sweeps, such as /var/spool/trashd")


def _matches_or_contains(pattern: bytes, path: bytes) -> bool:
    """Whether a pattern matches a path, or one of the directories above the path."""
    patterns, names = pattern.decode().split("/"), path.decode().split("/")
    return len(patterns) <= len(names) and all(map(_matches_name, patterns[1:], names[1:]))


def _matches_name(pattern: str, name: str) -> bool:
    return name.startswith(".") <= pattern.startswith(".") and compile_glob(pattern)(name)


class _RuleBuilder(SettingsBuilder):
    def __init__(self, table: SettingsReader, context: PlanContext, problems: list[ConfigProblem]) -> None:
        super().__init__(table.settings, problems)
        self._table = table
        self._context = context

    def build(self) -> Rule | None:
        n_before = len(self.problems)
        if self._is_absent("directory"):
            self._add_rule_problem("no directory", 'add directory = "/…"')
        if not any(self.get(key) or self._is_wrong(key) for key in _NARROWS) and not self._table.has_unknown:
            fix = 'write older = "30d", or name = "*" to select everything'
            self._add_rule_problem("the rule has no condition that selects files", fix)
        age, is_unit = self._read_age(), self._has("unit")
        selection = self._selection(age, is_unit=is_unit)
        self._check_unit() if is_unit else self._check_types(selection)
        purge, action = self._read_purge(age), self._read_action()
        if len(self.problems) > n_before or self._table.invalid_keys or self._table.has_unknown:
            return None
        return Rule(
            self._table.place, self.get("directory"), selection, action, age, is_unit, self.get("max_delete"), purge,
            self.get("trusts_atime", otherwise=False),
        )  # fmt: skip

    def _has(self, *key: str) -> bool:
        return key in self.settings

    def _is_wrong(self, *key: str) -> bool:
        """Whether a key's value is invalid. The value has been reported, so it should cause no further problem."""
        return key in self._table.invalid_keys

    def _is_absent(self, *key: str) -> bool:
        """Whether a key is not set, and no unknown key could be a misspelling of it."""
        return not (self._has(*key) or self._is_wrong(*key) or self._table.has_unknown)

    def _add_rule_problem(self, what: str, fix: str) -> None:
        """Add a problem that concerns the rule as a whole."""
        self.problems.append(self._table.place.problem(what, fix))

    def _read(self, key: str, read: Callable[[Any], Any], otherwise: Any = None) -> Any:
        """Convert a setting with `read`. If `read` raises an error, add the error's message as a problem."""
        if not self._has(key):
            return otherwise
        try:
            return read(self.get(key))
        except ValueError as error:
            self.add_problem(str(error), "", (key,))
            return otherwise

    def _selection(self, age: RuleAge | None, *, is_unit: bool) -> Selection:
        def read_one(key: str, check: Callable[[str], Any]) -> tuple[Any, ...]:
            value = self._read(key, check)
            return () if value is None else (value,)

        def sizes(texts: tuple[str, ...]) -> tuple[SizeBound, ...]:
            return tuple(map(selection.parse_size_bound, texts))

        least, most = self._read("depth", selection.parse_depths, (1, None))
        types = self._read("type", lambda texts: selection.parse_types(",".join(texts)), frozenset())
        return Selection(
            names=read_one("name", selection.check_name),
            inames=read_one("iname", lambda text: selection.check_name(text, ignores_case=True)),
            paths=read_one("path", selection.check_path),
            regexes=read_one("regex", selection.check_regex),
            excludes=self._read("exclude", lambda texts: tuple(map(selection.check_exclude, texts)), ()),
            types=types or (frozenset(KINDS) if is_unit else frozenset()),
            sizes=self._read("size", sizes, ()),
            times=self._read_times(None if is_unit else age),
            uids=read_one("user", self._context.uid_of),
            gids=read_one("group", self._context.gid_of),
            empty=self.get("empty", otherwise=False),
            min_depth=least,
            max_depth=1 if is_unit else most,
        )

    def _read_times(self, age: RuleAge | None) -> tuple[TimeBound, ...]:
        newer_ns = self._read("newer", self._parse_moment)
        if self._has("by") and self._is_absent("older") and self._is_absent("newer"):
            self.add_problem("by needs older or newer", 'add older = "30d"', ("by",))
        older = () if age is None else tuple(TimeBound(field, before_ns=age.before_ns) for field in age.fields)
        newer = () if newer_ns is None else tuple(TimeBound(field, after_ns=newer_ns) for field in self._fields())
        return older + newer

    def _read_age(self) -> RuleAge | None:
        older_ns = self._read("older", partial(self._parse_moment, cutoff_ns=self._context.cutoff_ns))
        return None if older_ns is None else RuleAge(self._fields(), older_ns)

    def _fields(self) -> tuple[Field, ...]:
        return tuple(field for field in TIMES if field in self.get("by", otherwise=("mtime",)))

    def _parse_moment(self, text: str, cutoff_ns: Callable[[int], int] | None = None) -> int:
        if is_file_time(text):
            raise ValueError(f"{text!r}: a plan accepts durations and dates, but not the time of a file")
        return parse_time(text, self._context.now_ns, self._context.local_s, cutoff_ns)

    def _check_unit(self) -> None:
        for key in filter(self._has, _NOT_OF_UNITS):
            fix = "remove the key: a unit is selected by name, owner and age, and taken as a whole"
            self.add_problem(f'{key} can\'t be combined with unit = "top"', fix, (key,))
        if self._is_absent("older"):
            self.add_problem(
                'unit = "top" needs older', 'add older = "90d": the age of a unit is that of its newest file', ("unit",)
            )

    def _check_types(self, selection: Selection) -> None:
        is_whole_tree = self._is_absent("unit") and not self._is_wrong("empty")
        if self._has("type") and selection.types & DEVICES:
            self.add_problem("the rule would select devices", "remove b and c: rules never touch devices", ("type",))
        if selection.types & DIRECTORY and not selection.empty and is_whole_tree:
            fix = 'add unit = "top" or empty = true: the age of a directory is not the age of the files in it'
            self.add_problem("the rule would take directories with everything in them", fix, ("type",))

    def _read_action(self) -> TrashAction | DeleteAction | MoveAction:
        action = self.get("action", otherwise="trash")
        if action != "trash" and self._has("keep_for"):
            self.add_problem(
                f'keep_for can\'t be combined with action = "{action}"',
                'remove keep_for: it applies to action = "trash" only',
                ("keep_for",),
            )
        if action != "move" and (self._has("action") or self._is_absent("action")):
            for key in filter(self._has, _OF_MOVE):
                self.add_problem(f'{key} needs action = "move"', 'add action = "move", or remove the key', (key,))
        elif action == "move" and self._is_absent("move_to"):
            self.add_problem('action = "move" needs move_to', 'add move_to = "/…"', ("action",))
        match action:
            case "delete":
                return DeleteAction()
            case "move":
                get = self.get
                return MoveAction(get("move_to", otherwise=b""), get("if_exists", otherwise="skip"))
            case _:
                return TrashAction(self.get("keep_for", otherwise=DEFAULT_RETENTION_S))

    def _read_purge(self, age: RuleAge | None) -> PurgeNotice | None:
        directory, ahead_s = self.get("purgelist", "directory"), self.get("purgelist", "ahead")
        if directory is None and ahead_s is None:
            return None
        keys = [key for key in self.settings if key[0] == "purgelist"]
        if directory is None or ahead_s is None:
            if not self._is_absent("purgelist", "directory" if directory is None else "ahead"):
                return None
            missing = "directory" if directory is None else "ahead"
            self.add_problem(f"purgelist needs {missing}", 'write { directory = "/…", ahead = "7d" }', *keys)
            return None
        if self._is_wrong("older") or (self._table.has_unknown and not self._has("older")):
            return None
        if not _SPAN.fullmatch(self.get("older", otherwise="")):
            fix = 'write older = "30d": a list can name in advance only files that reach an age'
            self.add_problem("purgelist needs older, with a duration and not a date", fix, *keys)
        elif age is not None and self._context.now_ns - age.before_ns <= ahead_s * SECOND_NS:
            self.add_problem(
                "ahead is not shorter than older",
                "write a shorter ahead: files that do not exist yet can't be listed",
                *keys,
            )
        return PurgeNotice(directory, ahead_s)
