"""docs/json.schema.json is made of the types that commands print, and what they print is as it says."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click
import pytest
from jsonschema import Draft202012Validator

from build_docs.json_schema import ERROR, JSON_VERSION, definition_of, printed, schema, text
from fusefs.cli.group import trashd as group
from tests.cli import test_golden as golden
from tests.cli.test_undo import in_a_shell
from tests.support.background_mounts import workbench
from tests.support.foreground_mount import trashd_mount
from tests.support.make_trees import make_tree
from tests.support.real_filesystems import tmpfs_volume
from tests.support.service_process import places, service
from tests.support.store_verbs import init
from tests.support.trashd_command import TRASHD, done_well, trashd

PUBLISHED = Path(__file__).parents[2] / "docs/json.schema.json"


def closed(node: Any) -> Any:
    """A schema that allows no key but its own: what is printed and not in it is found too."""
    if isinstance(node, list):
        return [closed(item) for item in node]
    if not isinstance(node, dict):
        return node
    told = {key: closed(item) for key, item in node.items()}
    return {**told, "additionalProperties": False} if "properties" in node and "required" in node else told


CLOSED = closed(schema())


def complaints(command: str, told: object, of: dict[str, Any] = CLOSED) -> list[str]:
    """What is not as the schema has it, of one object."""
    validator = Draft202012Validator({"$ref": f"#/$defs/{definition_of(command)}", "$defs": of["$defs"]})
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(told)]


def commands_with_json(within: click.Group, name: str = "") -> Iterator[str]:
    """All that have an option --json, groups' own too."""
    context = click.Context(within)
    for word in within.list_commands(context):
        command = within.get_command(context, word)
        if isinstance(command, click.Group):
            yield from commands_with_json(command, f"{name}{word} ")
        elif command is not None and any("--json" in option.opts for option in command.params):
            yield name + word


PLAN = """\
[[rule]]
directory = "$PWD/victim"
name = "*"
[[rule]]
directory = "$PWD/victim"
older = "9d"
[[rule]]
directory = "$PWD/none"
older = "9d"
purgelist = { directory = "$PWD/lists", ahead = "1d" }
"""
SWAP = "id=$(trashd swap --print-id --note 'a note' victim)"
TO_QUARANTINE = f"chattr +i victim/file; {SWAP}; ! trashd reap --now $id >&2"
AS_USER = "export HOME=$PWD XDG_DATA_HOME= XDG_RUNTIME_DIR=; trashd service install --user >&2"
SCENES = {
    "init": "trashd init --json .",
    "swap": "trashd swap --json victim",
    "swap-now": "trashd swap --json --now victim",
    "swap-dry": "trashd swap --json --dry-run victim",
    "swap-awaited-in-vain": "head -c 1M /dev/zero >victim/file; ! trashd swap --json --wait victim",
    "swap-waited": "trashd swap --json --wait victim",
    "rm": "trashd rm --json victim",
    "rm-now": "trashd rm --json --now victim",
    "rm-together": "mkdir other; trashd rm --json victim other",
    "list": f"{SWAP}; trashd list --json --volume .",
    "list-dropped": "mv victim .trashd/u/0/drop/; trashd list --json --volume .",
    "list-unreadable": f"{SWAP}; record=.trashd/u/0/orphans/$id/record.json; cp $record kept; echo {{}} >$record;"
    " trashd list --json --volume .; cat kept >$record",
    "list-sized": f"{SWAP}; trashd du --volume . >&2; trashd list --json --volume .",
    "list-quarantined": f"{TO_QUARANTINE}; trashd list --json --volume .",
    "restore": f"{SWAP}; trashd restore --json --volume . $id",
    "restore-rescued": f"{SWAP}; touch victim/meanwhile; trashd restore --json --volume . $id",
    "restore-quarantined": f"{TO_QUARANTINE}; trashd restore --json --volume . $id",
    "undo": "trashd rm victim >&2; trashd undo --json",
    "du": f"{SWAP}; trashd du --json --volume .",
    "ls": f"ln -s file victim/link; {SWAP}; trashd ls --json --volume . $id",
    "diff": f"{SWAP}; touch victim/new; trashd diff --json --volume . $id",
    "keep": f"{SWAP}; trashd keep --json --volume . $id",
    "reap": f"{SWAP}; trashd reap --json --now --volume . $id",
    "reap-quarantined": f"{TO_QUARANTINE}; ! trashd reap --json --volume . $id",
    "reap-force": f"{TO_QUARANTINE}; trashd reap --force --yes --json --volume . $id",
    "reap-dry": f"{SWAP}; trashd reap --json --dry-run --all --now --volume .",
    "reap-waited": f"{SWAP}; trashd reap --json --all --now --wait --count --volume .",
    "reap-pinned": f"{SWAP}; trashd keep --volume . $id >&2; trashd reap --json --all --now --volume .",
    "check": "trashd check --json victim",
    "check-refused": "! trashd check --json victim/file",
    "holders": "trashd holders --json victim",
    "holders-of-some": "exec 3<victim/file; trashd holders --json victim 3<&-",
    "sweep": "trashd sweep --json victim --name 'f*'",
    "sweep-dry": "trashd sweep --json victim --name 'f*' --dry-run",
    "sweep-printed": "trashd sweep --json victim --name 'f*' --print",
    "plan-show": f"head -3 >plan.toml <<.; trashd plan show --json plan.toml\n{PLAN}.",
    "plan": f"cat >plan.toml <<.; trashd plan apply --json $PWD/plan.toml || [ $? = 1 ]\n{PLAN}.",
    "plan-check": "printf '[[rule]]\ndirectory = \"/\"\n' >plan.toml; ! trashd plan check --json plan.toml",
    "status": f"{SWAP}; trashd status --json",
    "doctor": "mkdir .trashd/u/0/orphans/stray; ! trashd doctor --json .; rmdir .trashd/u/0/orphans/stray",
    "pause": "trashd pause --json --for 2h .",
    "pause-of-all": "trashd pause --json",
    "resume": "trashd pause . >&2; trashd resume --json",
    "service-install": "trashd service install --json --dry-run --root $PWD/root",
    "service-status": f"{AS_USER}; trashd service status --user --json",
    "service-uninstall": f"{AS_USER}; trashd service uninstall --user --json",
    "config-check": "printf '[defaults]\nretension = \"1h\"\n' >c.toml; ! trashd config check --json $PWD/c.toml",
    "config-show": "trashd config show --json",
    "config-show-of-path": "trashd config show --json .",
    "error": "! trashd swap --json $PWD/missing 2>&1",
}
"""Lines of a shell in a volume; what is not the subject of one is printed to standard error."""
WITH_SERVICE = ("swap-waited", "status")
PROMISED = {
    "init", "swap", "swap-now", "rm", "list", "list-quarantined", "restore", "restore-quarantined", "keep", "reap",
    "reap-quarantined", "reap-force", "check", "check-refused", "holders", "plan", "doctor", "config-check", "error",
}  # fmt: skip
"""These have golden files."""


def command_of(scene: str) -> str:
    """The command whose schema it is, the last one of a scene that has --json."""
    if scene == "error":
        return ERROR
    *_others, command = re.findall(r"trashd ((?:(?:plan|service|config) )?[a-z]+)[^;]* --json", SCENES[scene])
    return str(command)


def act(scene: str, volume: Path) -> list[dict[str, Any]]:
    with places() as base, service(base, volume) if scene in WITH_SERVICE else nullcontext():
        search = f"PATH={Path(TRASHD).parent}:{os.environ['PATH']}"
        done = in_a_shell("set -e", search, SCENES[scene], cwd=volume)
    assert done.code == 0, done
    return done.objects()


ON_A_MOUNT = {"status": ("status", "--json"), "mount": ("mount", "--explain", "--json")}


def test_every_command_with_json_has_a_schema_and_is_tried() -> None:
    commands = set(commands_with_json(group))
    assert commands | {ERROR} == set(printed())
    assert commands | {ERROR} == {*map(command_of, SCENES), *ON_A_MOUNT, "umount"}


def test_what_is_published_is_what_the_types_say() -> None:
    assert PUBLISHED.read_text(encoding="utf-8") == text(), "make schema"


def test_the_removed_option_for_the_schema_has_the_file_as_its_hint() -> None:
    done = trashd("--json-schema")
    assert done.code == 2
    assert "docs/json.schema.json" in done.err


def test_it_is_a_schema_with_a_version() -> None:
    Draft202012Validator.check_schema(schema())
    assert schema()["version"] == JSON_VERSION


def test_later_versions_may_add_keys_and_take_none() -> None:
    told = {"id": "x", "retention_s": None, "expires_ns": None}
    assert complaints("keep", {**told, "a_new_one": 1}, schema()) == []
    assert complaints("keep", {"id": "x", "retention_s": None}, schema()) != []


@pytest.mark.needs("root")
@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.quick("swap", "rm", "check", "holders", "list", "restore", "keep", "reap", "plan", "doctor")
def test_what_a_command_prints_is_as_its_schema_says_and_as_promised(volume: Path, scene: str) -> None:
    make_tree(volume / "victim", {"file": "content"})
    objects = act(scene, volume)
    assert objects
    assert [complaints(command_of(scene), told) for told in objects] == [[]] * len(objects)
    if scene in PROMISED:
        steady = [golden.steady(told, {str(volume): "<volume>"}) for told in objects]
        golden.compare(f"json-{scene}.json", json.dumps(steady, indent=1) + "\n")


@pytest.mark.needs("root", "fuse")
@pytest.mark.parametrize("command", ON_A_MOUNT)
def test_what_is_told_of_a_mount_is_as_its_schema_says(command: str) -> None:
    with tmpfs_volume() as path:
        init(path)
        with trashd_mount(path) as mounted:
            (mounted.path / "file").touch()
            words = (mounted.path,) if command == "mount" else ()
            (told,) = trashd(*ON_A_MOUNT[command], *words).objects()
    assert complaints(command, told) == []


@pytest.mark.needs("root", "fuse")
def test_what_is_told_of_an_end_of_a_mount_is_as_its_schema_says() -> None:
    with workbench() as bench:
        done_well("mount", bench / "source", bench / "target")
        (told,) = done_well("umount", "--json", bench / "target").objects()
    assert complaints("umount", told) == []


@pytest.mark.parametrize(
    "words",
    [
        ("list", "--json", "--volume", "/nowhere"), ("swap", "--json"), ("swap", "--json", "--no-such-option"),
        ("restore", "--json", "/nowhere/at/all"), ("config", "check", "--json", "/nowhere.toml", "--system"),
    ],
)  # fmt: skip
def test_what_is_refused_is_told_as_an_error_of_the_schema(words: tuple[str, ...]) -> None:
    done = trashd(*words)
    told = json.loads(done.err)
    assert complaints(ERROR, told) == []
    assert (done.out, told["exit_code"]) == ("", done.code)
