"""README, the manual pages and docs/howto/troubleshooting.md have each command, option and error, and no others."""

import ast
import inspect
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from build_docs.man_pages import page_names, page_of
from build_docs.man_roff import to_roff
from fusefs.cli.group import trashd
from fusefs.core.errors import BY_NAME, TrashdError
from fusefs.core.mount_options import OPTIONS
from tests.support.manual import FORMATS, PARTS, TITLES, page, sources

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
COMMANDS = trashd.list_commands(click.Context(trashd))


def find_command(name: str) -> click.Command:
    command = trashd.get_command(click.Context(trashd), name)
    assert command is not None, f"there is no trashd {name}"
    return command


def options_of(command: click.Command) -> set[str]:
    """Its options, those of the commands inside it too."""
    found = {"--help", "-h"}
    if isinstance(command, click.Group):
        found.update(*(options_of(one) for one in command.commands.values()))
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            found.update(parameter.opts + parameter.secondary_opts)
    return found


def code_of(text: str) -> list[str]:
    """The lines of the text's code blocks."""
    return [
        line.strip() for block in re.findall(r"```[^\n]*\n(.*?)```", text, re.DOTALL) for line in block.splitlines()
    ]


def uses_of_trashd(text: str) -> list[list[str]]:
    """The words after `trashd` in code blocks and inline code."""
    lines = [*code_of(text), *re.findall(r"`(trashd [^`]+)`", text)]
    found = []
    for line in lines:
        for part in re.split(r"[|;]|&&", line.partition("#")[0]):
            words = shlex.split(part)
            if "trashd" in words:
                found.append(words[words.index("trashd") + 1 :])
    return [words for words in found if words and words[0] not in ("install", "--version")]


def test_the_readme_uses_trashd() -> None:
    assert len(uses_of_trashd(README)) >= 8


@pytest.mark.parametrize("words", uses_of_trashd(README), ids=" ".join)
def test_a_command_of_the_readme_exists(words: list[str]) -> None:
    given = {word.partition("=")[0] for word in words if re.match("--?[a-z0]", word)}
    assert given <= options_of(find_command(words[0]))


def test_make_targets_of_the_readme_and_for_contributors_exist() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    used = {line.split()[1] for line in code_of(README + CONTRIBUTING) if line.startswith("make ")}
    assert used >= {"demo", "test", "quick", "lint"}
    assert used <= set(targets)


def test_make_quick_has_a_sample_of_every_command() -> None:
    texts = (path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    samples = (words for text in texts for words in re.findall(r"^@pytest\.mark\.quick\((.+)\)$", text, re.MULTILINE))
    assert set(re.findall(r'"(\w+)"', " ".join(samples))) == set(COMMANDS)


def test_documents_of_the_readme_exist() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []


def test_the_document_of_the_mount_tells_each_of_its_options() -> None:
    text = (ROOT / "docs/reference/mount-options.md").read_text(encoding="utf-8")
    told = {re.sub("[ =].*", "", code) for code in re.findall(r"(?<=[` ])--[a-z][^`]*", text)}
    assert {one.switch() for one in OPTIONS if one.help} <= told


NAMES = page_names()
HELP = {"-h", "--help"}


def commands_of(name: str) -> Iterator[click.Command]:
    """A page's command, and those inside it that are listed."""
    command = trashd if name == "trashd" else trashd.get_command(click.Context(trashd), name)
    assert command is not None
    yield command
    if isinstance(command, click.Group) and name != "trashd":
        yield from (one for one in command.commands.values() if not one.hidden)


def listed_options(name: str) -> set[str]:
    """Those that are listed."""
    options = [one for command in commands_of(name) for one in command.params if isinstance(one, click.Option)]
    return {word for one in options if not one.hidden for word in (*one.opts, *one.secondary_opts)}


def plain(text: str) -> str:
    """Its words, however they are set."""
    return " ".join(re.sub(r"[`*\b]", "", text).split())


def test_every_command_has_a_part_and_there_is_no_other() -> None:
    assert sorted(path.stem for path in PARTS.iterdir()) == sorted([*NAMES, *FORMATS])


SECTIONS_IN_ORDER = [
    "Name", "Synopsis", "Description", "Options", "Examples", "Exit status", "Files", "Environment", "See also",
]  # fmt: skip


def headings_of(text: str) -> list[str]:
    """The headings of a page that every page has."""
    return [head for head in re.findall(r"^## (.*)$", text, re.MULTILINE) if head in SECTIONS_IN_ORDER]


@pytest.mark.parametrize("name", NAMES)
def test_every_page_has_the_usual_sections_in_order(name: str) -> None:
    assert headings_of(page(name)) == SECTIONS_IN_ORDER


@pytest.mark.parametrize("name", FORMATS)
def test_a_page_of_section_5_has_the_usual_sections_in_order(name: str) -> None:
    usual = [head for head in SECTIONS_IN_ORDER if head not in ("Options", "Exit status")]
    assert headings_of((PARTS / f"{name}.md").read_text(encoding="utf-8")) == usual


def test_a_part_without_exit_status_files_and_environment_refers_to_the_first_page() -> None:
    text = page_of("undo", "# trashd undo\n\n## See also\n\nls(1)\n")
    assert re.findall(r"^## (.*)\n\nSee trashd\(1\)\.$", text, re.MULTILINE) == ["Exit status", "Files", "Environment"]


@pytest.mark.parametrize("name", NAMES)
def test_a_page_says_all_that_the_help_says(name: str) -> None:
    told = plain(page(name))
    for command in commands_of(name):
        paragraphs = re.sub(r"^Examples?:$", "\n", inspect.cleandoc(command.help or ""), flags=re.MULTILINE)
        assert [one for one in paragraphs.split("\n\n") if plain(one) not in told] == []
        texts = [one.help for one in command.params if isinstance(one, click.Option) and one.help and not one.hidden]
        assert [one for one in texts if plain(one) not in told] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_page_has_every_option_of_its_command(name: str) -> None:
    items = " ".join(re.findall(r"^- (`-.*?): ", page(name), re.MULTILINE))
    assert set(re.findall(r"`(--?[\w-]+)`", items)) == listed_options(name) - HELP


@pytest.mark.parametrize("name", NAMES)
def test_no_page_knows_an_option_that_is_not(name: str) -> None:
    known = HELP.union(*(listed_options(one) for one in NAMES))
    code = re.sub(r"`mv [^`]*`|^.*\b(?:find|git|sbatch|systemctl)\b.*$", "", page(name), flags=re.MULTILINE)
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", code)) <= known


@pytest.mark.parametrize("name", NAMES)
def test_what_a_page_refers_to_is_there(name: str) -> None:
    assert set(re.findall(r"\b(trashd[\w-]*)\(1\)", page(name))) <= set(TITLES)
    assert {f"{one}.5" for one in re.findall(r"\b(trashd[\w.-]*)\(5\)", page(name))} <= set(FORMATS)


@pytest.mark.parametrize("name", ["trashd", "config", "plan", "service"])
def test_the_pages_of_the_formats_are_referred_to(name: str) -> None:
    named = set(re.findall(r"\b(trashd[.-]\w+)\(5\)", page(name).partition("## See also")[2]))
    assert named >= {"trashd.conf" if name == "config" else "trashd-plan"}


def test_the_first_page_leads_to_all_others() -> None:
    assert set(re.findall(r"^- (trashd-[\w-]*)\(1\): ", page("trashd"), re.MULTILINE)) == set(TITLES) - {"trashd"}


def test_a_part_that_tells_of_an_option_that_is_gone_is_found() -> None:
    with pytest.raises(LookupError, match="trashd undo has no --gone"):
        page_of("undo", "# trashd undo\n\n## Options\n\n- `--gone`: More of it.\n\n## See also\n\nls(1)\n")


def test_the_page_of_mounts_tells_their_options_as_the_table_does() -> None:
    (words,) = re.findall(r"^Options for `-o`: (.*?), and ", page("mount"), re.MULTILINE)
    assert re.findall(r"\w+=?", words) == [one.word() for one in OPTIONS if one.is_documented]


def test_man_and_mandoc_have_nothing_to_say_of_any_page(tmp_path: Path) -> None:
    for name, source in sources().items():
        (tmp_path / name).write_bytes(source)
    pages = sorted(tmp_path.glob("*.[15]"))
    assert {one.name for one in pages} == {*(f"{title}.1" for title in TITLES), *FORMATS}
    for command in (["mandoc", "-T", "lint", "-W", "style"], ["groff", "-man", "-Tutf8", "-ww", "-K", "utf8", "-z"]):
        done = subprocess.run([*command, *pages], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_helper_of_mount_has_the_page_of_trashd_mount() -> None:
    assert sources()["mount.fuse.trashd.8"] == b".so man1/trashd-mount.1\n"


def shown(text: str) -> str:
    """What man(1) prints of a paragraph, or of an example."""
    source = to_roff(f"# trashd-x(1)\n\n## Name\n\n{text}\n", "2026-11-26", "1")
    command = ["mandoc", "-T", "utf8", "-O", "width=200"]
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=True)
    return "\n".join(re.sub(".\b", "", done.stdout).splitlines()[3:-2])


@pytest.mark.parametrize(
    "words",
    ["`a\\b`", "`.x`", "`'x'`", "`--a-b`", "`~/x^y`", "*DIR*", "find(1)", "a\\b", "'twas", ". dot", "`a`[=*B*]..."],
)
def test_what_is_typed_is_shown_as_it_is(words: str) -> None:
    assert shown(words).strip() == re.sub("[`*]", "", words)


def test_an_example_is_shown_as_it_is() -> None:
    lines = [".TH x", "'a' \\fB \"b\"", "", "  ~ `c` -0"]
    assert shown("```sh\n" + "\n".join(lines) + "\n```").splitlines() == [f"       {one}".rstrip() for one in lines]


TEXT = (ROOT / "docs/howto/troubleshooting.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^### `?(.*?)`?\n\n((?:(?!^##).*\n)+)", TEXT, re.MULTILINE))
ERRORS = [kind for kind in BY_NAME.values() if kind is not TrashdError]


@pytest.fixture(scope="module")
def said() -> str:
    """All that the product could print."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "fusefs").rglob("*.py"))
    nodes = (node for tree in trees for node in ast.walk(tree))
    return "\0".join(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))


def test_there_are_sections() -> None:
    assert len(SECTIONS) == len(re.findall("^### ", TEXT, re.MULTILINE)) > 30


@pytest.mark.parametrize("error", ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_is_told_with_its_exit_code(error: type[TrashdError]) -> None:
    section = SECTIONS[error("").message()]  # of a class without a phrase, its docstring
    assert f"Exit code {error.exit_code}." in section


def test_every_message_that_is_told_can_be_met(said: str) -> None:
    told = [*SECTIONS, *re.findall(r"\*`([^`]*)`\*", TEXT)]
    assert [message for message in told if message not in said] == []
