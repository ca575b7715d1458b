"""Edits of one file's imports, names and identifiers, by LibCST's scopes."""

import builtins
import re
from collections.abc import Iterator
from typing import NamedTuple

import libcst as cst
from libcst.metadata import (
    ByteSpanPositionProvider,
    ClassScope,
    GlobalScope,
    ImportAssignment,
    MetadataWrapper,
    ParentNodeProvider,
    Scope,
    ScopeProvider,
)
from typing_extensions import override

from tests.renaming.plan import Edit, Map

_POSITIONS = ByteSpanPositionProvider
_WORD = re.compile(r"(?<![.\w])[A-Za-z_]\w*")


class Job(NamedTuple):
    """One file, and what its edits need to know."""

    path: str
    module: str
    source: bytes
    names: Map
    modules: frozenset[str]


class Done(NamedTuple):
    edits: list[Edit]
    refusals: list[str]


class _Use(NamedTuple):
    """A Name where it is read, bound or declared."""

    node: cst.Name
    scope: Scope
    home: Scope | None
    """Where it is bound; None: a builtin, or nowhere."""


def edit_code(job: Job) -> Done:
    """What changes in code; strings and comments are another's."""
    if not job.source.strip():
        return Done([], [])
    wrapper = MetadataWrapper(cst.parse_module(job.source), unsafe_skip_copy=True)
    file = _File(job, wrapper)
    wrapper.module.visit(file)
    file.finish()
    return Done(file.edits, file.refusals)


def _dotted(node: cst.BaseExpression) -> list[cst.Name]:
    """The names of `a.b.c`, or nothing if it begins with something else."""
    names: list[cst.Name] = []
    while isinstance(node, cst.Attribute):
        names.append(node.attr)
        node = node.value
    return [*names, node][::-1] if isinstance(node, cst.Name) else []


def _text(names: list[cst.Name]) -> str:
    return ".".join(name.value for name in names)


def _statement(assignment: ImportAssignment) -> cst.Import | cst.ImportFrom:
    assert isinstance(assignment.node, cst.Import | cst.ImportFrom)
    return assignment.node


class _File(cst.CSTVisitor):
    def __init__(self, job: Job, wrapper: MetadataWrapper) -> None:
        super().__init__()
        self.job = job
        self.edits: list[Edit] = []
        self.refusals: list[str] = []
        self._positions = wrapper.resolve(_POSITIONS)
        self._scopes = wrapper.resolve(ScopeProvider)
        self._parents = wrapper.resolve(ParentNodeProvider)
        self._uses: list[_Use] = []
        self._attributes: list[cst.Attribute] = []
        self._own = job.names.top_names(job.module)
        self._words = job.names.identifiers_in(job.path)
        self._tops = {module.partition(".")[0] for module in job.modules}
        self._own_names: dict[Scope, set[str]] = {}
        self._targets: dict[tuple[Scope, str], str] = {}

    # -- collecting

    @override
    def visit_Import(self, node: cst.Import) -> bool:
        for alias in node.names:
            names = _dotted(alias.name)
            self._move_dotted(names, _text(names))
        return False

    @override
    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        if node.module is not None and not node.relative and not isinstance(node.names, cst.ImportStar):
            self._import_from(node, node.module, node.names)
        return False

    @override
    def visit_Attribute(self, node: cst.Attribute) -> bool:
        self._attributes.append(node)
        node.value.visit(self)
        return False

    @override
    def visit_Arg(self, node: cst.Arg) -> bool:
        if node.keyword is not None and node.keyword.value in self._words:
            self._replace(node.keyword, self._words[node.keyword.value])
        node.value.visit(self)
        return False

    @override
    def visit_MatchKeywordElement(self, node: cst.MatchKeywordElement) -> bool:
        if node.key.value in self._words:
            self._replace(node.key, self._words[node.key.value])
        node.pattern.visit(self)
        return False

    @override
    def visit_Name(self, node: cst.Name) -> bool:
        scope = self._scopes.get(node)
        if isinstance(scope, Scope):
            scope = self._scope_of(node, scope)
            self._uses.append(_Use(node, scope, self._home(scope, node.value)))
        return False

    @override
    def visit_SimpleString(self, node: cst.SimpleString) -> bool:
        scope = self._scopes.get(node)
        if isinstance(scope, Scope) and self._is_type(node):
            start = self._positions[node].start + len(node.prefix) + len(node.quote)
            for word in _WORD.finditer(node.raw_value):
                home = self._home(scope, word.group())
                new = word.group() if home is None else self._target(home, word.group())
                if new != word.group():
                    self.edits.append(Edit(start + word.start(), start + word.end(), new))
        return False

    def _is_type(self, node: cst.CSTNode) -> bool:
        """Whether a string is an annotation, or what cast() makes of something."""
        child, parent = node, self._parents.get(node)
        while isinstance(parent, cst.BaseExpression | cst.Arg | cst.BaseSlice | cst.SubscriptElement):
            if isinstance(parent, cst.Call):
                return _text(_dotted(parent.func)).endswith("cast") and child is parent.args[0]
            child, parent = parent, self._parents.get(parent)
        return isinstance(parent, cst.Annotation)

    def _scope_of(self, node: cst.Name, scope: Scope) -> Scope:
        """A function's or class's name is bound outside it, a parameter inside."""
        parent = self._parents.get(node)
        if isinstance(parent, cst.FunctionDef | cst.ClassDef) and parent.name is node:
            outer = self._scopes.get(parent)
            return outer if isinstance(outer, Scope) else scope
        return scope

    # -- scopes

    def _names_of(self, scope: Scope) -> set[str]:
        if scope not in self._own_names:
            self._own_names[scope] = {assignment.name.split(".")[0] for assignment in scope.assignments}
        return self._own_names[scope]

    def _home(self, scope: Scope, name: str, *, after: bool = False) -> Scope | None:
        """Where a name is bound, looked for from a scope outwards as Python does."""
        at: Scope | None = scope
        while at is not None:
            names = self._after(at) if after else self._names_of(at)
            if name in names and (at is scope or not isinstance(at, ClassScope)) and self._is_ours(at):
                return at
            at = at.parent if at.parent is not at else None
        return None

    def _is_ours(self, scope: Scope) -> bool:
        return type(scope).__name__ != "BuiltinScope"

    def _after(self, scope: Scope) -> set[str]:
        return {self._target(scope, name) for name in self._names_of(scope)}

    def _target(self, scope: Scope, name: str) -> str:
        """What a name bound in this scope will be; the same if nothing renames it."""
        key = (scope, name)
        if key not in self._targets:
            self._targets[key] = self._find_target(scope, name)
        return self._targets[key]

    def _find_target(self, scope: Scope, name: str) -> str:
        targets = set()
        for assignment in scope[name]:
            if isinstance(assignment, ImportAssignment):
                targets.add(self._imported_target(assignment, name))
            elif isinstance(scope, GlobalScope) and name in self._own:
                targets.add(self._own[name])
            else:
                targets.add(self._words.get(name, name))
        if len(targets) > 1:
            self._refuse(f"{name} is bound in one scope as what would be {sorted(targets)}")
        return min(targets, default=name)

    def _imported_target(self, assignment: ImportAssignment, name: str) -> str:
        node = _statement(assignment)
        for alias in node.names if not isinstance(node.names, cst.ImportStar) else ():
            bound = alias.asname.name if alias.asname else None
            if isinstance(bound, cst.Name) and bound.value == name:
                return self._words.get(name, name)
        if isinstance(node, cst.ImportFrom) and node.module is not None:
            return self._renamed_import(_text(_dotted(node.module)), name)[1]
        return name

    def _renamed_import(self, module: str, name: str) -> tuple[str, str]:
        """Where `from module import name` finds it, and as what."""
        names = self.job.names
        if f"{module}.{name}" in self.job.modules:
            parent, _, last = names.moved(f"{module}.{name}").rpartition(".")
            return parent, last
        return names.moved(module), names.top_names(module).get(name, name)

    # -- statements that import

    def _import_from(self, node: cst.ImportFrom, module: cst.BaseExpression, aliases: object) -> None:
        assert isinstance(aliases, tuple | list)
        names = _dotted(module)
        old_module = _text(names)
        if old_module.partition(".")[0] not in self._tops:
            return
        by_parent: dict[str, list[str]] = {}
        for alias in aliases:
            old = alias.name.value
            parent, new = self._renamed_import(old_module, old)
            if alias.asname is not None:
                bound = alias.asname.name.value
                bound_new = self._words.get(bound, bound)
                by_parent.setdefault(parent, []).append(f"{new} as {bound_new}")
                self._replace(alias.asname.name, bound_new)
            else:
                by_parent.setdefault(parent, []).append(new)
            self._replace(alias.name, new)
        if len(by_parent) == 1:
            (parent,) = by_parent
            if parent != old_module:
                self._move_dotted(names, parent, is_new=True)
            return
        self._split(node, by_parent)

    def _split(self, node: cst.ImportFrom, by_parent: dict[str, list[str]]) -> None:
        span = self._positions[node]
        start, end = span.start, span.start + span.length
        line_start = self.job.source.rfind(b"\n", 0, start) + 1
        indent = self.job.source[line_start:start]
        if indent.strip() or b"#" in self.job.source[start:end]:
            self._refuse(f"line {self._line(start)}: an import to be split has a comment in it, or something before it")
            return
        self.edits = [edit for edit in self.edits if not start <= edit.start < end]
        lines = [f"from {parent} import {', '.join(names)}" for parent, names in by_parent.items()]
        self.edits.append(Edit(start, end, f"\n{indent.decode()}".join(lines)))

    def _move_dotted(self, names: list[cst.Name], old: str, *, is_new: bool = False) -> None:
        new = old if is_new else self.job.names.moved(old)
        if names and new != _text(names):
            first, last = self._positions[names[0]], self._positions[names[-1]]
            self.edits.append(Edit(first.start, last.start + last.length, new))

    # -- after the visit

    def finish(self) -> None:
        for use in self._uses:
            self._finish_use(use)
        for attribute in self._attributes:
            self._finish_attribute(attribute)
        for scope in {scope for scope in self._scopes.values() if isinstance(scope, Scope) and self._is_ours(scope)}:
            self._check_scope(scope)

    def _finish_use(self, use: _Use) -> None:
        old = use.node.value
        new = old if use.home is None else self._target(use.home, old)
        if use.home is None and old in self._words and not hasattr(builtins, old):
            new = self._words[old]
        if self._home(use.scope, new, after=True) is not use.home and (use.home is not None or new == old):
            line = self._line(self._positions[use.node].start)
            self._refuse(f"line {line}: {old} would be {new}, which means something else there")
        self._replace(use.node, new)

    def _check_scope(self, scope: Scope) -> None:
        came: dict[str, str] = {}
        for name in sorted(self._names_of(scope)):
            new = self._target(scope, name)
            if new in came:
                self._refuse(f"{came[new]} and {name} would both be {new} in one scope")
            if new != name and hasattr(builtins, new) and not isinstance(scope, ClassScope):
                self._refuse(f"{name} would hide the builtin {new}")
            came[new] = name

    def _finish_attribute(self, node: cst.Attribute) -> None:
        names = _dotted(node)
        imported = self._imported_prefix(names) if names else None
        if imported is None or not self._is_module(".".join([imported[0], *imported[1][:-1]])):
            if node.attr.value in self._words:
                self._replace(node.attr, self._words[node.attr.value])
            return
        prefix, rest = imported
        parts = [*prefix.split("."), *rest]
        for n in range(len(parts) - 1, 0, -1):
            module = ".".join(parts[:n])
            if module in self.job.modules:
                if n == len(parts) - 1:
                    self._replace(node.attr, self.job.names.top_names(module).get(parts[-1], parts[-1]))
                break
        whole = ".".join(parts)
        if whole in self.job.modules and prefix in self.job.modules and self._is_plain_import(names[0]):
            self._move_dotted(names, whole)

    def _is_module(self, full: str) -> bool:
        """Or of another project: what is in there is no business of this map."""
        return full in self.job.modules or full.partition(".")[0] not in self._tops

    def _imported_prefix(self, names: list[cst.Name]) -> tuple[str, list[str]] | None:
        """For `crew.Crew` after `from fusefs.reaper import crew`: fusefs.reaper.crew, [Crew]; None if not imported."""
        scope = self._scopes.get(names[0])
        if not isinstance(scope, Scope):
            return None
        first = names[0].value
        home = self._home(scope, first)
        if home is None:
            return None
        rest = [name.value for name in names[1:]]
        for full in self._full_names(home, first):
            return full, rest
        return None

    def _full_names(self, home: Scope, name: str) -> Iterator[str]:
        for assignment in home.assignments:
            if not isinstance(assignment, ImportAssignment) or assignment.name.split(".")[0] != name:
                continue
            node = _statement(assignment)
            if isinstance(node.names, cst.ImportStar):
                continue
            for alias in node.names:
                bound = alias.asname.name.value if alias.asname and isinstance(alias.asname.name, cst.Name) else None
                imported = _text(_dotted(alias.name))
                if isinstance(node, cst.ImportFrom):
                    if (bound or imported) == name and node.module is not None:
                        yield f"{_text(_dotted(node.module))}.{imported}"
                elif bound == name:
                    yield imported
                elif bound is None and imported.split(".")[0] == name:
                    yield name

    def _is_plain_import(self, first: cst.Name) -> bool:
        """Whether the name is bound by `import a.b`: the whole chain is told again at each use."""
        scope = self._scopes.get(first)
        home = self._home(scope, first.value) if isinstance(scope, Scope) else None
        return home is not None and first.value in self._full_names(home, first.value)

    # -- what is noted

    def _replace(self, node: cst.CSTNode, new: str) -> None:
        assert isinstance(node, cst.Name)
        if node.value != new:
            span = self._positions[node]
            self.edits.append(Edit(span.start, span.start + span.length, new))

    def _line(self, offset: int) -> int:
        return self.job.source.count(b"\n", 0, offset) + 1

    def _refuse(self, reason: str) -> None:
        complaint = f"{self.job.path}: {reason}"
        if complaint not in self.refusals:
            self.refusals.append(complaint)
