"""Help, messages, manual pages, documents, docstrings and comments keep to docs/internals/style.md."""

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

import click

from fusefs.cli.group import trashd
from tests.support.source_modules import ROOT, Module, all_modules

MOST_WORDS = 35
FUSED = re.compile(r"(?:^|(?<=[.;:] ))(?:Who|Whoever|Whom|What|Whatever)\b[^.?!]*[.!;]")
"""A relative as a subject: "Who has files open keeps them." A question is none."""
BANNED = re.compile(
    r"\b(?:told|tells?|by which|of which|whoever|somebody|he|his|him|himself|"
    r"look(?:s|ed|ing)? at|takes? in|taken in|took in|lent|lends?|loans?|seams?|gates?|wings?|laws?|floors?|"
    r"the word of|takes? .{0,20} for dead|believes?)\b",
    re.IGNORECASE,
)
"""Words in the senses that style.md lists, as far as no other sense of them is common."""
BANNED_FOR_USERS = re.compile(r"\b(?:nobody (?:has|is|was|does|else)|victims?|hands|alone)\b", re.IGNORECASE)
BANNED_IN_CODE = re.compile(
    r"\b(?:told|tells?|whoever|lent|loans?|seams?|wings?|laws?|floors?|looks? at)\b", re.IGNORECASE
)
PARTS_OF_DOCS = ("start", "howto", "reference", "explain", "internals", "changes")
UNCHECKED = ("docs/internals/benchmarks/", "docs/internals/style.md")
VAGUE_NAMES = {"told", "tell", "look", "found", "seen", "known", "run", "done"}
"""No function and no attribute is called so, with or without an underscore before it."""
ALLOWED_NAMES = {"fusefs.cli.main": {"run"}}
"""`run` of a whole program, as in subprocess."""


class Text(NamedTuple):
    """A text that a person reads, and where it stands."""

    where: str
    text: str


def program() -> Iterator[Module]:
    return (module for module in all_modules() if module.name.startswith("fusefs"))


def help_texts() -> Iterator[Text]:
    def walk(path: str, command: click.Command) -> Iterator[Text]:
        prose, _, _examples = (command.help or "").partition("\b")
        yield from (Text(path, one) for one in (command.short_help or "", prose))
        for param in command.params:
            if isinstance(param, click.Option):
                yield Text(f"{path} {param.opts[-1]}", param.help or "")
        if isinstance(command, click.Group):
            for name in command.list_commands(click.Context(command)):
                inner = command.get_command(click.Context(command), name)
                assert inner is not None
                yield from walk(f"{path} {name}", inner)

    yield from walk("trashd", trashd)


def messages() -> Iterator[Text]:
    """Every text of several words in the program, without docstrings and the values of enums, which are not printed."""
    for module in program():
        quiet = {id(inner) for node in module.nodes if is_quiet(node) for inner in ast.walk(node)}
        for node in module.nodes:
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in quiet:
                continue
            if len(node.value.split()) > 2 and "\n" not in node.value:
                yield Text(f"{module.name}:{node.lineno}", node.value)


def is_quiet(node: ast.AST) -> bool:
    """Whether a node is a docstring or an enum."""
    is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_docstring or (isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "Enum" for base in node.bases))


def pages(*patterns: str) -> Iterator[Text]:
    for pattern in patterns:
        for path in sorted(ROOT.glob(pattern)):
            yield Text(str(path.relative_to(ROOT)), prose_of(path.read_text(encoding="utf-8")))


def prose_of(markdown: str) -> str:
    """A page without its examples, code and comments; each item and each cell of a table is a sentence."""
    text = re.sub(r"^```.*?^```|<!--.*?-->", "", markdown, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`[^`]*`", "CODE", text)
    return re.sub(r" \| |^[|#*-]+ ?|\|$", "\n\n", text, flags=re.MULTILINE)


def sentences(text: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", text):
        yield from re.split(r"(?<=[.?!;:]) +(?=[^a-z])", " ".join(paragraph.split()))


def faults(text: str, *banned: re.Pattern[str]) -> Iterator[str]:
    for sentence in sentences(text):
        for pattern in banned:
            yield from (f"says {match[0]!r}: {sentence}" for match in pattern.finditer(sentence))
        if FUSED.search(sentence):
            yield f"has a relative as its subject: {sentence}"
        if len(sentence.split()) > MOST_WORDS:
            yield f"has {len(sentence.split())} words: {sentence}"


def all_faults(texts: Iterator[Text], *banned: re.Pattern[str]) -> list[str]:
    return [f"{where}: {fault}" for where, text in texts for fault in faults(text, *banned)]


def test_help_is_plain() -> None:
    assert all_faults(help_texts(), BANNED, BANNED_FOR_USERS) == []


def test_messages_are_plain() -> None:
    assert all_faults(messages(), BANNED, BANNED_FOR_USERS) == []


def test_manual_pages_are_plain() -> None:
    assert all_faults(pages("docs/man/*.md"), BANNED, BANNED_FOR_USERS) == []


def test_documents_are_plain() -> None:
    """All but the dated records of benchmarks, which stay as they were written, and the list of words itself."""
    everywhere = pages("*.md", "docs/*.md", *(f"docs/{part}/**/*.md" for part in PARTS_OF_DOCS))
    assert all_faults((page for page in everywhere if not page.where.startswith(UNCHECKED)), BANNED) == []


def test_docstrings_and_comments_are_plain() -> None:
    texts = (Text(module.name, text) for module in program() for text in module.prose())
    assert [f"{where}: {match[0]}" for where, text in texts for match in BANNED_IN_CODE.finditer(text)] == []


def vague_names(module: Module) -> Iterator[str]:
    """Functions, and attributes of classes, whose names say nothing."""
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.ClassDef):
            yield from (
                one.target.id
                for one in node.body
                if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
            )
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def test_names_of_functions_and_attributes_say_what_they_are() -> None:
    for module in program():
        vague = {name for name in vague_names(module) if name.lstrip("_") in VAGUE_NAMES}
        assert vague <= ALLOWED_NAMES.get(module.name, set()), module.name
