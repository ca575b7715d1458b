"""Each command line of the table ends as the table, the golden files, the JSON schema and the documents say."""

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from jsonschema import Draft202012Validator

from build_docs.json_schema import ERROR, JSON_VERSION, definition_of, printed, schema, text
from fusefs.cli import main, rm_paths, swap_paths
from fusefs.cli.output import wants_json
from fusefs.core.errors import BY_NAME, NotFound
from tests.support.background_mounts import workbench
from tests.support.command_scenarios import SCENARIOS, Scenario, fill
from tests.support.golden_files import GOLDEN, ID, compare, steady
from tests.support.real_filesystems import tmpfs_volume
from tests.support.store_verbs import init
from tests.support.trashd_command import CommandResult, done_well
from tests.support.typed_commands import FILLED_IN, all_commands, mistakes

PUBLISHED = Path(__file__).parents[2] / "docs/json.schema.json"


def closed(node: Any) -> Any:
    """A schema that allows no key but its own: what is printed and not in it is found too."""
    if isinstance(node, list):
        return [closed(item) for item in node]
    if not isinstance(node, dict):
        return node
    told = {key: closed(item) for key, item in node.items()}
    return {**told, "additionalProperties": False} if "properties" in node and "required" in node else told


@cache
def _validator(command: str, *, is_closed: bool) -> Draft202012Validator:
    definitions = (closed(schema()) if is_closed else schema())["$defs"]
    return Draft202012Validator({"$ref": f"#/$defs/{definition_of(command)}", "$defs": definitions})


def complaints(command: str, told: object, *, is_closed: bool = True) -> list[str]:
    """What is not as the schema has it, of one object."""
    return [
        f"{error.json_path}: {error.message}" for error in _validator(command, is_closed=is_closed).iter_errors(told)
    ]


def test_what_is_published_is_what_the_types_say() -> None:
    assert PUBLISHED.read_text(encoding="utf-8") == text(), "make schema"


def test_it_is_a_schema_with_a_version() -> None:
    Draft202012Validator.check_schema(schema())
    assert schema()["version"] == JSON_VERSION


def test_later_versions_may_add_keys_and_take_none() -> None:
    told = {"id": "x", "retention_s": None, "expires_ns": None}
    assert complaints("keep", {**told, "a_new_one": 1}, is_closed=False) == []
    assert complaints("keep", {**told, "a_new_one": 1}) != []
    assert complaints("keep", {"id": "x", "retention_s": None}, is_closed=False) != []


@pytest.mark.needs("root", "fuse")
def test_what_is_told_of_an_end_of_a_mount_is_as_its_schema_says() -> None:
    with workbench() as bench:
        done_well("mount", bench / "source", bench / "target")
        (umount_result,) = done_well("umount", "--json", bench / "target").objects()
    assert complaints("umount", umount_result) == []


ROOT = Path(__file__).parents[2]
PAGES = ("docs/reference/json.md", "docs/reference/metrics-and-events.md")
DOCUMENTED = {key for page in PAGES for key in re.findall(r"`(\w+)`", (ROOT / page).read_text(encoding="utf-8"))}
DOCUMENTED_ELSEWHERE = ("config show", "mount")
"""trashd.conf(5) and trashd-mount(1) have their keys."""
LINES = {"swap": swap_paths.LINE, "rm": rm_paths.LINE}
WITH_HINTS = [kind for kind in BY_NAME.values() if kind.problem and kind is not NotFound]
"""A path that was typed wrong needs no hint, and a usage error has its usage line."""
_ERROR = re.compile(f"trashd: .*({'|'.join(re.escape(kind.problem) for kind in WITH_HINTS)})$")
_USAGE_ERROR = re.compile(
    r"trashd[ a-z]*: .+\n(  hint: .+\n)?usage: trashd.*\nTry 'trashd[ a-z]* --help' for more information\.\n"
)
GOLDEN_OF_OTHERS = {"config-show.toml", "json-config-show.json", "json-status.json"}
"""test_config.py compares the first two, on a machine without a configuration, test_status.py the last."""


class Result(NamedTuple):
    """How a scenario ended, and the volume."""

    scenario: Scenario
    done: CommandResult
    place: Path

    def has_json(self) -> bool:
        return wants_json(self.scenario.words.split())

    def errors(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.done.err.splitlines() if line.startswith("{")]


Complaints = Iterator[str]


def check_end(result: Result) -> Complaints:
    """The exit code and parts of the output are the table's."""
    scenario, done, place = result
    text = done.out + done.err
    if done.code != scenario.code:
        yield f"exit code {done.code}, not {scenario.code}"
    if "Traceback" in text or (text and scenario.is_silent):
        yield "it prints something else"
    yield from (f"{part!r} is not printed" for part in scenario.prints if fill(part, place) not in text)
    yield from (f"{part!r} is printed" for part in scenario.lacks if part in text)


def check_error(result: Result) -> Complaints:
    """One error is on standard error, with the exit code of its class; nothing is on standard output."""
    scenario, done, _place = result
    if not scenario.error:
        return
    kind = BY_NAME[scenario.error]
    if done.out or scenario.code != kind.exit_code:
        yield f"{scenario.error} has the exit code {kind.exit_code}, and nothing is on standard output"
    first, *_ = done.err.splitlines() or [""]
    if result.has_json():
        found = [(error["error"], error["exit_code"]) for error in result.errors()]
        if found != [(scenario.error, scenario.code)]:
            yield f"the errors are {found}"
    elif scenario.error == "UsageError":
        if not _USAGE_ERROR.fullmatch(done.err):
            yield "it is not printed as a usage error"
    elif not first.startswith("trashd: ") or not first.endswith(kind.problem):
        yield f"it is no {scenario.error}"


def check_hints(result: Result) -> Complaints:
    """Each error has a hint, except usage errors and paths that are not found."""
    for error in result.errors():
        if not error.get("hint") and error.get("error") not in ("UsageError", "NotFound"):
            yield f"no hint: {error}"
    for line, after in pairwise([*result.done.err.splitlines(), ""]):
        if _ERROR.match(line) and not after.startswith("  hint: "):
            yield f"no hint after {line!r}"


def check_commands(result: Result) -> Complaints:
    """The commands that the output names, as in hints, can be typed. Help is among the strings of the source, below."""
    if not result.scenario.golden.startswith("help-"):
        lines = (result.done.out + result.done.err).splitlines()
        yield from (one for line in lines if not re.match("usage: |Try ", line) for one in mistakes(line))


def check_json(result: Result) -> Complaints:
    """The objects are as the schema says, and the documents have their keys."""
    if not result.has_json():
        return
    out = [(command_of(result.scenario), one) for one in result.done.objects()]
    told = [*out, *((ERROR, one) for one in result.errors())]
    if not told and not result.scenario.is_silent:
        yield "no JSON"
    for command, one in told:
        yield from complaints(command, one)
        if command not in DOCUMENTED_ELSEWHERE and "mounts" not in one:
            yield from (f"{PAGES[0]} lacks {key}" for key in {*keys_of(one)} - DOCUMENTED)


def check_golden_file(result: Result) -> Complaints:
    """The output is the golden file's."""
    scenario, done, place = result
    if not scenario.golden:
        return
    text = done.out
    if scenario.golden.startswith("json-"):
        told = [steady(one, {str(place): "<volume>"}) for one in done.objects() or result.errors()]
        text = json.dumps(told, indent=1) + "\n"
    try:
        compare(scenario.golden, text)
    except AssertionError as error:
        yield str(error)


def check_by_click(result: Result) -> Complaints:
    """A line that is read without click has the same result if click reads it."""
    scenario, done, place = result
    name, *words = ("",) if scenario.is_bare or "{id}" in scenario.words else scenario.split(place)
    if name not in LINES or LINES[name].read(words) is None:
        return
    with tmpfs_volume("256m") as other, pytest.MonkeyPatch.context() as patch:
        patch.setattr(main, "_find_plain_line", lambda _arguments: None)  # the forked command inherits it
        init(other)
        by_click = scenario.play(other)
        if without_changes(by_click, other) != without_changes(done, place):
            yield f"by click: {by_click}"


def without_changes(done: CommandResult, place: Path) -> CommandResult:
    """A result without the volume's path, ids, times and messages of a busy machine."""
    changing = re.compile(
        rf"trashd: yielding: .*\n|{ID.pattern}|(?<=_ns\": )\d+|\d+-\d\d-\d\d \d\d:\d\d|{re.escape(str(place))}"
    )
    return CommandResult(done.code, changing.sub("", done.out), changing.sub("", done.err))


CHECKERS = (check_end, check_error, check_hints, check_commands, check_json, check_golden_file, check_by_click)


@pytest.mark.quick("swap", "rm", "check", "holders", "list", "restore", "keep", "reap", "plan", "doctor")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if one.is_bare else pytest.mark.needs("root", *one.needs))
        for name, one in SCENARIOS.items()
    ],
)
def test_a_command_ends_as_the_table_says(request: pytest.FixtureRequest, name: str) -> None:
    scenario = SCENARIOS[name]
    place = request.getfixturevalue("tmp_path" if scenario.is_bare else "volume")
    result = Result(scenario, scenario.play(place), place)
    assert [f"{check.__name__}: {one}" for check in CHECKERS for one in check(result)] == [], result.done


def keys_of(value: Any) -> Iterator[str]:
    """All keys in a value, however deep."""
    if isinstance(value, dict):
        yield from value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from keys_of(inner)


def command_of(scenario: Scenario) -> str:
    """The command whose schema its JSON follows."""
    return max((one for one in printed() if f"{scenario.words} ".startswith(f"{one} ")), key=len, default=ERROR)


def test_every_command_with_json_has_a_schema_and_a_scenario() -> None:
    commands = {name for name, one in all_commands() if any("--json" in option.opts for option in one.params)}
    assert commands | {ERROR} == set(printed())
    tried = {command_of(one) for one in SCENARIOS.values() if "--json" in one.words and not one.error}
    assert tried | {"umount"} == commands


def test_every_golden_file_is_compared() -> None:
    compared = {one.golden for one in SCENARIOS.values() if one.golden}
    assert {path.name for path in GOLDEN.iterdir()} == compared | GOLDEN_OF_OTHERS


def test_every_key_of_the_status_of_a_made_up_service_is_documented() -> None:
    status = json.loads((GOLDEN / "json-status.json").read_text(encoding="utf-8"))
    assert {*keys_of(status)} <= DOCUMENTED


def strings(source: str, *, is_command: bool) -> Iterator[str]:
    """The strings of a file that users can see; docstrings are help texts in the modules of commands only."""
    nodes = list(ast.walk(ast.parse(source)))
    if not is_command:
        docstrings = {id(one.value) for one in nodes if isinstance(one, ast.Expr)}
        nodes = [one for one in nodes if id(one) not in docstrings]
    formatted = [node for node in nodes if isinstance(node, ast.JoinedStr)]
    parts = {id(part) for node in formatted for part in ast.walk(node)}
    for node in formatted:
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else FILLED_IN for part in node.values)
    for one in nodes:
        if isinstance(one, ast.Constant) and isinstance(one.value, str) and id(one) not in parts:
            yield one.value


def test_the_commands_that_hints_help_and_other_strings_name_can_be_typed() -> None:
    texts = set()
    for path in (ROOT / "fusefs").rglob("*.py"):
        if "trashd " in (source := path.read_text(encoding="utf-8")):
            found = strings(source, is_command=path.parent.name == "cli")
            texts |= {text for text in found if "trashd " in text}
    assert {kind.hint for kind in BY_NAME.values() if "trashd " in kind.hint} <= texts
    assert sorted(one for text in texts for line in text.splitlines() for one in mistakes(line)) == []


def test_a_text_that_names_no_command_or_option_is_found() -> None:
    assert [*mistakes("trashd list shows it; trashd reap --now ID frees it; trashd restore ID [PATH]")] == []
    for wrong in ("trashd unswap DIR", "trashd reap --later ID", "trashd keep ID ID", "trashd service instal"):
        assert len([*mistakes(wrong)]) == 1, wrong
