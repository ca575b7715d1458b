"""How easily one finds one's way in the source: sizes, names, imports, and reaches into other objects' parts.

    python -m bench.code_metrics [--json] [--compare FILE] [PATH]

It reads syntax trees below PATH (default: this checkout), runs nothing, and tells two columns: fusefs and tests.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

PARTS = ("fusefs", "tests")
_LARGE_LINES, _SMALL_LINES = 600, 60
_VALUES = {
    "NamedTuple", "Enum", "IntEnum", "StrEnum", "Flag", "IntFlag", "Struct", "Protocol", "TypedDict", "Exception",
}  # fmt: skip
_PERSONS = re.compile(r"\b(somebody|nobody|his|he)\b", re.IGNORECASE)
_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
    tokenize.ENCODING,
}  # fmt: skip

Graph = Mapping[str, Collection[str]]


class Module:
    """A source file: its dotted name (a package's is its `__init__`'s), text and syntax tree."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.text = text
        self.tree = ast.parse(text)
        self.nodes = list(ast.walk(self.tree))

    @property
    def stem(self) -> str:
        """The last part of its name."""
        return self.name.rpartition(".")[2]

    @property
    def n_lines(self) -> int:
        """All lines of the file."""
        return len(self.text.splitlines())

    @cached_property
    def docstrings(self) -> list[ast.Constant]:
        """Strings that are statements: of modules, classes and functions, and those below a constant or a field."""
        return [
            node.value
            for node in self.nodes
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        ]

    @cached_property
    def first_docstrings(self) -> list[str]:
        """Docstrings in the strict sense: the first statement of a module, class or function."""
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        return [text for node in self.nodes if isinstance(node, kinds) if (text := ast.get_docstring(node))]

    @cached_property
    def classes(self) -> list[ast.ClassDef]:
        """Those at the top of the file."""
        return [node for node in self.tree.body if isinstance(node, ast.ClassDef)]

    def code_lines(self) -> int:
        """How many lines have code: neither blank, nor only a comment, nor a docstring's."""
        lines: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in _NO_CODE:
                lines.update(range(token.start[0], token.end[0] + 1))
        for text in self.docstrings:
            lines.difference_update(_span(text))
        return len(lines)

    def import_lines(self) -> int:
        """How many lines are of imports."""
        return len(
            {line for node in self.nodes if isinstance(node, ast.Import | ast.ImportFrom) for line in _span(node)}
        )

    def imports(self, module_names: Collection[str]) -> set[str]:
        """Return which of these modules it imports, in functions and for type checks too."""
        found: set[str] = set()
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= inner & set(module_names) or {node.module}
        return (found & set(module_names)) - {self.name}


class Figures(NamedTuple):
    """What is told of a part of the source.

    alone                 files with exactly one importer in the same part; of these
    alone_untested        no test file imports
    circles               files that import each other, in whatever way round
    twice                 names of modules that are in more than one package, cli/ left out
    shared                names that several top-level classes have, with how many
    the_same              docstrings that begin "The same"
    persons               how often docstrings say somebody, nobody, his or he
    reaches               `x.part.member` where the part has behaviour: how often, by module and part
    """

    code_lines: int
    import_lines: int
    files: int
    large: list[str]
    small: list[str]
    alone: list[str]
    alone_untested: list[str]
    circles: list[list[str]]
    twice: list[str]
    classes: int
    class_names: int
    shared: dict[str, int]
    the_same: int
    persons: int
    reaches: dict[str, int]


TITLES = {
    "code_lines": "lines of code, without blanks, comments and docstrings",
    "import_lines": "lines of imports",
    "files": "files",
    "large": f"files of more than {_LARGE_LINES} lines",
    "small": f"modules of less than {_SMALL_LINES} lines",
    "alone": "files with exactly one importer",
    "alone_untested": "  of which no test file imports",
    "circles": "import circles",
    "twice": "module names that occur twice outside cli/",
    "classes": "top-level classes",
    "class_names": "  distinct names of these",
    "shared": "  names that several have",
    "the_same": 'docstrings that begin "The same"',
    "persons": "somebody, nobody, his, he in docstrings",
    "reaches": "reaches into another object's parts",
}
_LISTED = ("large", "circles", "twice", "shared", "reaches")


def _span(node: ast.stmt | ast.expr) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def read_modules(top: Path, part: str) -> dict[str, Module]:
    """All modules of a part of a checkout, by their names."""
    found = {}
    for path in sorted((top / part).rglob("*.py")):
        words = path.relative_to(top).with_suffix("").parts
        name = ".".join(words[:-1] if words[-1] == "__init__" else words)
        found[name] = Module(name, path.read_text(encoding="utf-8"))
    return found


def measure(part: str, house: Mapping[str, Module]) -> Figures:
    """Count all of it in a part of all modules."""
    modules = {name: module for name, module in house.items() if name.partition(".")[0] == part}
    graph = {name: module.imports(modules) for name, module in modules.items()}
    importers = Counter(imported for found in graph.values() for imported in found)
    alone = sorted(name for name in modules if importers[name] == 1)
    tested: set[str] = set()
    for module in house.values():
        if module.stem.startswith("test_"):
            tested |= module.imports(modules)
    classes = Counter(one.name for module in modules.values() for one in module.classes)
    packages = {name.rpartition(".")[0] for name in modules}
    stems = Counter(module.stem for name, module in modules.items() if name not in packages and ".cli." not in name)
    texts = [text.value for module in modules.values() for text in module.docstrings]
    return Figures(
        code_lines=sum(module.code_lines() for module in modules.values()),
        import_lines=sum(module.import_lines() for module in modules.values()),
        files=len(modules),
        large=sorted(name for name, module in modules.items() if module.n_lines > _LARGE_LINES),
        small=sorted(
            name for name, module in modules.items() if module.n_lines < _SMALL_LINES and name not in packages
        ),
        alone=alone,
        alone_untested=[name for name in alone if name not in tested],
        circles=find_circles(graph),
        twice=sorted(stem for stem, n in stems.items() if n > 1),
        classes=classes.total(),
        class_names=len(classes),
        shared={name: n for name, n in sorted(classes.items()) if n > 1},
        the_same=sum(text.startswith("The same") for module in modules.values() for text in module.first_docstrings),
        persons=sum(len(_PERSONS.findall(str(text))) for text in texts),
        reaches=dict(sorted(Reaches(house).count(part).items())),
    )


def find_circles(graph: Graph) -> list[list[str]]:
    """The sets of modules that reach each other, by Tarjan's way; a module by itself is none."""
    found: list[list[str]] = []
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    for root in graph:
        if root in order:
            continue
        work: list[tuple[str, Iterator[str]]] = []
        _enter(root, graph, order, low, stack, work)
        while work:
            name, others = work[-1]
            for other in others:
                if other not in order:
                    _enter(other, graph, order, low, stack, work)
                    break
                if other in stack:
                    low[name] = min(low[name], order[other])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[name])
                if low[name] == order[name]:
                    at = stack.index(name)
                    if len(stack) - at > 1:
                        found.append(sorted(stack[at:]))
                    del stack[at:]
    return sorted(found)


def _enter(
    name: str,
    graph: Graph,
    order: dict[str, int],
    low: dict[str, int],
    stack: list[str],
    work: list[tuple[str, Iterator[str]]],
) -> None:
    order[name] = low[name] = len(order)
    stack.append(name)
    work.append((name, iter(sorted(graph[name]))))


class Reaches:
    """Finds `x.part.member` where `part` is an object with behaviour, and `x` neither self, a class nor a module.

    What `x` is follows from annotations and from what is called for it. Where it does not, a part counts by its name,
    if all attributes of that name are objects with behaviour.
    """

    def __init__(self, modules: Mapping[str, Module]) -> None:
        self._modules = modules
        self._names = {name: self._bound(module) for name, module in modules.items()}
        self._classes: dict[str, tuple[Module, ast.ClassDef]] = {
            f"{name}.{one.name}": (module, one) for name, module in modules.items() for one in module.classes
        }
        self._functions = {
            f"{name}.{one.name}": (module, one.returns)
            for name, module in modules.items()
            for one in module.tree.body
            if isinstance(one, ast.FunctionDef)
        }
        self._attributes: dict[str, dict[str, str | None]] = {}
        self._by_name: dict[str, set[str | None]] = defaultdict(set)
        for full in self._classes:
            for attribute, kind in self._attributes_of(full).items():
                self._by_name[attribute].add(kind if self._behaves(kind) else None)

    def count(self, part: str) -> Counter[str]:
        """How often in the modules of a part, by `module: part`."""
        found: Counter[str] = Counter()
        for name, module in self._modules.items():
            for inside, kinds in self._scopes(module) if name.startswith(part) else ():
                for node in inside:
                    match node:
                        case ast.Attribute(value=ast.Attribute() as held) if self._is_reach(module, held, kinds):
                            found[f"{name}: {held.attr}"] += 1
        return found

    def _is_reach(self, module: Module, part: ast.Attribute, kinds: Mapping[str, str | None]) -> bool:
        owner = part.value
        if isinstance(owner, ast.Name):
            bound = self._names[module.name].get(owner.id)
            if owner.id in ("self", "cls") or (owner.id not in kinds and bound is not None):
                return False
        elif not isinstance(owner, ast.Attribute):
            return self._is_by_name(part.attr)
        kind = self._kind(module, owner, kinds)
        if kind is not None:
            return self._behaves(self._attribute(kind, part.attr))
        return self._is_by_name(part.attr)

    def _is_by_name(self, attribute: str) -> bool:
        kinds = self._by_name.get(attribute, {None})
        return None not in kinds

    def _scopes(self, module: Module) -> Iterator[tuple[Iterable[ast.AST], dict[str, str | None]]]:
        """The nodes of each function, those of functions inside it left out, with what is known of its names."""
        todo: list[tuple[ast.AST, dict[str, str | None]]] = [(module.tree, {})]
        while todo:
            top, kinds = todo.pop()
            nodes: list[ast.AST] = []
            for node in _own_nodes(top):
                nodes.append(node)
                if isinstance(node, ast.ClassDef):
                    todo.append((node, {**kinds, "self": f"{module.name}.{node.name}"}))
                elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                    todo.append((node, {**kinds, **self._parameters(module, node)}))
            for node in nodes:
                match node:
                    case ast.Assign(targets=[ast.Name(id=name)], value=value):
                        kinds[name] = self._kind(module, value, kinds)
                    case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation):
                        kinds[name] = self._annotated(module, annotation)
                    case ast.withitem(context_expr=value, optional_vars=ast.Name(id=name)):
                        kinds[name] = self._kind(module, value, kinds)
                    case ast.Name(id=name, ctx=ast.Store()):
                        kinds.setdefault(name, None)
            yield nodes, kinds

    def _parameters(
        self, module: Module, function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    ) -> dict[str, str | None]:
        arguments = function.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        return {one.arg: self._annotated(module, one.annotation) for one in every if one.arg not in ("self", "cls")}

    def _kind(self, module: Module, value: ast.expr, kinds: Mapping[str, str | None]) -> str | None:
        """The class of what an expression is, as far as can be seen."""
        match value:
            case ast.Name(id=name):
                return kinds.get(name)
            case ast.Attribute(value=owner, attr=attribute):
                of = self._kind(module, owner, kinds)
                return None if of is None else self._attribute(of, attribute)
            case ast.Call(func=ast.Name(id=name)) if name in self._names[module.name]:
                at, returns = self._functions.get(self._names[module.name][name], (module, value.func))
                return self._annotated(at, returns)
            case ast.Call(func=function):
                return self._named(module, function)
        return None

    def _attribute(self, kind: str, attribute: str) -> str | None:
        """The class of an attribute of a class, or of what that is made of."""
        visited: set[str] = set()
        todo = [kind]
        while todo:
            one = todo.pop()
            if one in visited or one not in self._classes:
                continue
            visited.add(one)
            if attribute in (found := self._attributes_of(one)):
                return found[attribute]
            module, node = self._classes[one]
            todo += [base for expression in node.bases if (base := self._named(module, expression))]
        return None

    def _attributes_of(self, kind: str) -> dict[str, str | None]:
        """The attributes of a class, with their classes."""
        if kind in self._attributes:
            return self._attributes[kind]
        found = self._attributes[kind] = {}  # a class that is made of itself finds it unfinished
        module, node = self._classes[kind]
        for one in node.body:
            match one:
                case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation):
                    found[name] = self._annotated(module, annotation)
                case ast.FunctionDef(name="__init__"):
                    found.update(self._made(module, one))
                case ast.FunctionDef(name=name, decorator_list=[*_, ast.Name(id="property" | "cached_property")]):
                    found[name] = self._annotated(module, one.returns)
        return found

    def _made(self, module: Module, function: ast.FunctionDef) -> dict[str, str | None]:
        """What `__init__` gives its object."""
        kinds = self._parameters(module, function)
        found: dict[str, str | None] = {}
        for node in ast.walk(function):
            match node:
                case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=name)], value=value):
                    found[name] = self._kind(module, value, kinds)
                case ast.AnnAssign(target=ast.Attribute(value=ast.Name(id="self"), attr=name), annotation=annotation):
                    found[name] = self._annotated(module, annotation)
        return found

    def _annotated(self, module: Module, annotation: ast.expr | None) -> str | None:
        """The product's class that an annotation names, alone or beside None."""
        match annotation:
            case ast.Constant(value=str(text)):
                return self._annotated(module, ast.parse(text, mode="eval").body)
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                return self._annotated(module, left) or self._annotated(module, right)
            case ast.Subscript(value=ast.Name(id="Final" | "ClassVar" | "Optional"), slice=inner):
                return self._annotated(module, inner)
            case ast.Name() | ast.Attribute() | ast.Subscript():
                return self._named(module, annotation)
        return None

    def _named(self, module: Module, expression: ast.expr) -> str | None:
        """The full name of a class that an expression names."""
        match expression:
            case ast.Name(id=name):
                full = self._names[module.name].get(name)
            case ast.Attribute(value=ast.Name(id=owner), attr=name):
                full = f"{self._names[module.name].get(owner)}.{name}"
            case ast.Subscript(value=value):
                full = self._named(module, value)
            case _:
                return None
        return full if full in self._classes else None

    def _behaves(self, kind: str | None) -> bool:
        """Whether a class is of ours and more than a value."""
        if kind is None or kind not in self._classes:
            return False
        module, node = self._classes[kind]
        if any(ast.unparse(one).partition("(")[0].endswith("dataclass") for one in node.decorator_list):
            return False
        for base in node.bases:
            if ast.unparse(base).partition("[")[0].rpartition(".")[2] in _VALUES:
                return False
            inner = self._named(module, base)
            if inner is not None and not self._behaves(inner):
                return False
        return True

    def _bound(self, module: Module) -> dict[str, str]:
        """What names at the top of a module, or imported anywhere in it, stand for."""
        found = {}
        for node in module.nodes:
            if isinstance(node, ast.Import):
                found.update({alias.asname or alias.name.partition(".")[0]: alias.name for alias in node.names})
            elif isinstance(node, ast.ImportFrom):
                found.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
        own = ast.ClassDef | ast.FunctionDef
        found.update({one.name: f"{module.name}.{one.name}" for one in module.tree.body if isinstance(one, own)})
        return found


def _own_nodes(top: ast.AST) -> Iterator[ast.AST]:
    """What is below a node, in the order of the text; of functions and classes inside it only themselves."""
    for child in ast.iter_child_nodes(top):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from _own_nodes(child)


def measure_checkout(top: Path) -> dict[str, dict[str, Any]]:
    """Return the figures of each part of a checkout."""
    house = {name: module for part in PARTS for name, module in read_modules(top, part).items()}
    return {part: measure(part, house)._asdict() for part in PARTS}


def number(value: Any) -> int:
    """A figure as a number: how many are listed, or how often what is listed was found."""
    if isinstance(value, int):
        return value
    return sum(value.values()) if isinstance(value, dict) and _counts(value) else len(value)


def _counts(value: dict[str, int]) -> bool:
    return any(":" in key for key in value)


def lines_of(now: Mapping[str, Mapping[str, Any]], before: Mapping[str, Mapping[str, Any]] | None) -> Iterator[str]:
    """For people: a table, and what there is of what should not be in fusefs."""
    yield f"{'':58}" + "".join(f"{part:>18}" for part in PARTS)
    for key, title in TITLES.items():
        cells = []
        for part in PARTS:
            cell = f"{number(now[part][key]):,}"
            cells.append(cell if before is None else f"{number(before[part][key]):,} → {cell}")
        yield f"{title:58}" + "".join(f"{cell:>18}" for cell in cells)
    for key in _LISTED:
        found = now[PARTS[0]][key]
        if found:
            yield f"\n{TITLES[key].strip()}, {PARTS[0]}:"
            yield from (f"  {line}" for line in _items(found))


def _items(figures: Sequence[Any] | Mapping[str, int]) -> Iterator[str]:
    if isinstance(figures, Mapping):
        yield from (f"{n:4} {name}" for name, n in sorted(figures.items(), key=lambda item: (-item[1], item[0])))
    else:
        yield from (one if isinstance(one, str) else ", ".join(one) for one in figures)


def main() -> None:
    """Measure, and tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", type=Path, default=Path(__file__).parents[1], metavar="PATH")
    parser.add_argument("--json", action="store_true", help="all that was found, for --compare")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="what --json told before")
    arguments = parser.parse_args()
    now = measure_checkout(arguments.path)
    if arguments.json:
        print(json.dumps(now, indent=1))
        return
    before = json.loads(arguments.compare.read_text(encoding="utf-8")) if arguments.compare else None
    for line in lines_of(now, before):
        print(line)


if __name__ == "__main__":
    main()
