"""Makes the manual pages as Markdown: trashd(1), a page for each command, and the pages of section 5.

Each command has a part in docs/man, which continues its `--help`. The text before its first heading is added to the
description. `## Options` has items ``- `--option`: more text``. A heading that is a command of a group (`## run`) has
the same items, and more description of that command. `## Examples` adds examples to those in the help. All other
headings are sections of the page. The pages of section 5 are files in docs/man, too: docs/man/trashd.conf.5.md.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import click

from build_docs.man_roff import to_roff
from fusefs.cli.group import SECTIONS, trashd

_ROOT = Path(__file__).parents[1]
_PARTS = _ROOT / "docs/man"
_SHORT_HELP_CHARS: Final = 200
_ITEM = re.compile(r"^- `(?P<option>--[a-z][a-z-]*)`: (?P<more>.*)\n?", re.MULTILINE)
_EXAMPLES = re.compile(r"\x08\nExamples?:\n(?P<lines>.*)", re.DOTALL)
_TO_MARK = re.compile(
    r"`[^`]*`"  # already marked
    r"|(?<![\w/'-])--?[A-Za-z][\w-]*"
    r"|[^\s,;()]*[*_<>][^\s,;:()]*(?<!\.)"  # Markdown would misread it
)
_SWITCH = re.compile(r"--?[A-Za-z0-9][\w-]*")
_SWITCHES = re.compile(rf"{_SWITCH.pattern}(?:(?:, | / ){_SWITCH.pattern})*")
_PLACEHOLDER = re.compile(r"[A-Z][A-Z-]+")


_LAST_SECTIONS: Final = ("Exit status", "Files", "Environment")
"""Sections between the examples and SEE ALSO that every page has; where a part lacks one, the page gets a reference."""
_ELSEWHERE: Final = "See trashd(1)."


class _Part(NamedTuple):
    """The part of a page from docs/man: more description, and the text below each heading."""

    intro: str
    sections: dict[str, str]


class _Command(NamedTuple):
    """A command as it is typed, `trashd plan show`."""

    path: str
    itself: click.Command

    def inside(self) -> list[_Command]:
        """Return the listed commands of a group."""
        inside = self.itself.commands if isinstance(self.itself, click.Group) else {}
        return [_Command(f"{self.path} {name}", one) for name, one in inside.items() if not one.hidden]

    def context(self) -> click.Context:
        return click.Context(self.itself, info_name=self.path)


def write_all(directory: Path) -> None:
    """Write man1/*.1 and man5/*.5 below a directory, and remove pages that no longer exist.

    The pages have the date of the newest release in CHANGELOG.md.
    """
    released = _in_root(r"^## .*\((.*)\)$", "CHANGELOG.md")
    version = _in_root(r'^VERSION = "(.*)"$', "fusefs/core/version.py")
    parts = {name: (_PARTS / f"{name}.md").read_text(encoding="utf-8") for name in [*page_names(), *format_names()]}
    pages = {directory / f"man1/{title_of(name)}.1": page_of(name, parts[name]) for name in page_names()}
    pages |= {directory / f"man5/{name}": parts[name] for name in format_names()}
    for path, page in pages.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}.{os.getpid()}")
        new.write_text(to_roff(page, released, version), encoding="utf-8")
        new.replace(path)
    for path in {*directory.glob("man1/*.1"), *directory.glob("man5/*.5")} - set(pages):
        path.unlink()


def _in_root(pattern: str, name: str) -> str:
    found = re.search(pattern, (_ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else ""


def page_names() -> list[str]:
    """Return the names of the pages of section 1: `trashd`, then all commands. Each has a part docs/man/<name>.md."""
    return ["trashd", *trashd.list_commands(click.Context(trashd))]


def format_names() -> list[str]:
    """Return the names of the pages of section 5, such as `trashd.conf.5`. Each has its text in docs/man/<name>.md."""
    return sorted(path.stem for path in _PARTS.glob("*.5.md"))


def title_of(name: str) -> str:
    """Return the title of a page of section 1: trashd-swap for "swap"."""
    return name if name == "trashd" else f"trashd-{name}"


def page_of(name: str, part: str) -> str:
    """Make the page for a command.

    part     the text of docs/man/<name>.md
    Returns  Markdown: headings of three levels, paragraphs of one line, items ``- `term`: text``, fenced examples
    Raises   LookupError if the part describes an unknown option, or has no `## See also`
    """
    command, told = _find(name), _read(part)
    more = told.sections
    text = {
        "Name": f"{title_of(name)} - {_in_brief(command.itself)}",
        "Synopsis": _joined(*(_usage(one) for one in command.inside() or [command])),
        "Description": _joined(_description(command), told.intro),
        "Commands": _joined(*(_told_inside(one, more) for one in command.inside())) or _all_commands(name),
        "Options": _with_options(command, more.pop("Options", "")) or "See COMMANDS.",
    }
    examples = _joined(*(_examples(one) for one in (command, *command.inside())), _unfenced(more.pop("Examples", "")))
    see_also = ("trashd(1), " if name != "trashd" else "") + more.pop("See also")
    last = {head: more.pop(head, _ELSEWHERE) for head in _LAST_SECTIONS}
    text |= {**more, "Examples": _fenced(examples), **last, "See also": see_also}
    return _joined(f"# {title_of(name)}(1)", *(f"## {head}\n\n{body}" for head, body in text.items() if body)) + "\n"


def _find(name: str) -> _Command:
    found = trashd if name == "trashd" else trashd.get_command(click.Context(trashd), name)
    if found is None:
        raise LookupError(name)
    return _Command("trashd" if name == "trashd" else f"trashd {name}", found)


def _read(part: str) -> _Part:
    first, *others = re.split(r"^## ", part, flags=re.MULTILINE)
    sections = {head: body.strip() for head, _, body in (other.partition("\n") for other in others)}
    return _Part(first.partition("\n")[2].strip(), sections)


def _joined(*texts: str) -> str:
    return "\n\n".join(filter(None, texts))


def _fenced(lines: str) -> str:
    return lines and f"```text\n{lines}\n```"


def _unfenced(text: str) -> str:
    return re.sub(r"^```\w*\n?", "", text, flags=re.MULTILINE).strip()


def _in_brief(command: click.Command) -> str:
    text = command.get_short_help_str(_SHORT_HELP_CHARS).removesuffix(".")
    return text[:1].lower() + text[1:]


def _usage(command: _Command) -> str:
    """Return the synopsis of a command, on one line."""
    if command.path == "trashd":
        return "`trashd` *COMMAND* [*OPTION*]... [*ARGUMENT*]..."
    options, *rest = command.itself.collect_usage_pieces(command.context())
    options = options.replace("[OPTIONS]", "[*OPTION*]...")
    return " ".join([f"`{command.path}`", options, *(_value(one) for one in rest)])


def _value(text: str) -> str:
    """Mark the placeholders in a usage line."""
    return _PLACEHOLDER.sub(r"*\g<0>*", text.replace("…", "..."))


def _placeholders(command: _Command) -> set[str]:
    pieces = command.itself.collect_usage_pieces(command.context())[1:]
    values = (value for _option, _switches, value, _help in _told_options(command))
    return set(_PLACEHOLDER.findall(" ".join([*pieces, *values])))


class _ToldOption(NamedTuple):
    """An option as `--help` lists it: the switches `-n, --dry-run`, the placeholder ` GLOB`, and the text."""

    option: click.Option
    switches: str
    value: str
    help: str


def _told_options(command: _Command) -> Iterator[_ToldOption]:
    for one in command.itself.params:
        record = one.get_help_record(command.context()) if isinstance(one, click.Option) else None
        if record is not None and isinstance(one, click.Option):
            found = _SWITCHES.match(record[0])
            assert found is not None
            yield _ToldOption(one, found[0], record[0][found.end() :], " ".join(record[1].split()))


def _marked(command: _Command, text: str) -> str:
    """Convert a help text to Markdown: options and paths become code, placeholders are emphasised."""
    known = _placeholders(command)

    def mark(found: re.Match[str]) -> str:
        word = found[0]
        return word if word.startswith("`") else f"*{word}*" if word in known else f"`{word}`"

    words = "|".join([*sorted(known, key=len, reverse=True)])
    pattern = rf"{_TO_MARK.pattern}|\b(?:{words})\b" if known else _TO_MARK.pattern
    return re.sub(pattern, mark, text)


def _help(command: _Command) -> str:
    return inspect.cleandoc(command.itself.help or "")


def _description(command: _Command) -> str:
    paragraphs = _help(command).partition("\x08")[0].strip().split("\n\n")
    return _joined(*(_marked(command, " ".join(one.split())) for one in paragraphs))


def _examples(command: _Command) -> str:
    found = _EXAMPLES.search(_help(command))
    return "\n".join(line.removeprefix("  ") for line in found["lines"].rstrip().splitlines()) if found else ""


def _with_options(command: _Command, told: str) -> str:
    """Return the text of a section, then all options, each with its text from the help and from the section."""
    more = {item["option"]: item["more"] for item in _ITEM.finditer(told)}
    items = []
    for option, switches, value, text in _told_options(command):
        term = _SWITCH.sub(r"`\g<0>`", switches) + _value(value)
        items.append(" ".join([f"- {term}:", _marked(command, text), *_taken(more, option.opts)]))
    if more:
        raise LookupError(f"{command.path} has no {', '.join(more)}")
    return _joined(_ITEM.sub("", told).strip(), "\n".join(items))


def _taken(more: dict[str, str], names: Iterable[str]) -> list[str]:
    return [more.pop(name) for name in names if name in more]


def _told_inside(command: _Command, more: dict[str, str]) -> str:
    """Return the subsection for a command of a group; its section is removed from `more`."""
    told = more.pop(command.itself.name or "", "")
    intro = _ITEM.sub("", told).strip()
    options = _with_options(command, told.removeprefix(intro))
    return _joined(f"### {command.path}", _description(command), intro, options)


def _all_commands(name: str) -> str:
    """Return the list of all commands for the page of trashd itself; empty for other pages."""
    sections = []
    for section, names in SECTIONS.items() if name == "trashd" else ():
        items = (f"- {title_of(one)}(1): {_find(one).itself.get_short_help_str(_SHORT_HELP_CHARS)}" for one in names)
        sections.append(_joined(f"### {section}", "\n".join(items)))
    return _joined(*sections)
