"""docs/json.schema.json is made of the types that commands print, and what they print is as it says."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
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
from tests.support.store_calls import init
from tests.support.trashd_command import Done, done_well, swapped, trashd

PUBLISHED = Path(__file__).parents[2] / "docs/json.schema.json"
Act = Callable[[Path, Path], Done]


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


def told_swap_dry(_volume: Path, victim: Path) -> Done:
    return done_well("swap", "--json", "--dry-run", victim)


def told_swap_waited(volume: Path, victim: Path) -> Done:
    with places() as base, service(base, volume):
        return done_well("swap", "--json", "--wait", victim)


def told_swap_awaited_in_vain(_volume: Path, victim: Path) -> Done:
    (victim / "file").write_bytes(b"x" * (1 << 20))
    with places():
        return trashd("swap", "--json", "--wait", victim)


def told_rm_now(_volume: Path, victim: Path) -> Done:
    return done_well("rm", "--json", "--now", victim)


def told_list_dropped(volume: Path, victim: Path) -> Done:
    victim.rename(volume / ".trashd/u/0/drop/victim")
    return done_well("list", "--json", "--volume", volume)


def told_list_unreadable(volume: Path, victim: Path) -> Done:
    swapped(victim)
    (record,) = (volume / ".trashd/u/0/orphans").glob("*/record.json")
    kept = record.read_bytes()
    record.write_bytes(b"{}")
    done = trashd("list", "--json", "--volume", volume)
    record.write_bytes(kept)
    return done


def told_list_sized(volume: Path, victim: Path) -> Done:
    swapped(victim)
    done_well("du", "--volume", volume)
    return done_well("list", "--json", "--volume", volume)


def told_restore_rescued(volume: Path, victim: Path) -> Done:
    identifier = swapped(victim)["id"]
    (victim / "meanwhile").touch()
    return done_well("restore", "--json", "--volume", volume, identifier)


def told_rm_together(volume: Path, victim: Path) -> Done:
    return done_well("rm", "--json", victim, make_tree(volume / "other", {}))


def told_undo(volume: Path, victim: Path) -> Done:
    return in_a_shell(f"trashd rm {victim} >/dev/null", "trashd undo --json", cwd=volume)


def told_du(volume: Path, victim: Path) -> Done:
    swapped(victim)
    return done_well("du", "--json", "--volume", volume)


def told_ls(volume: Path, victim: Path) -> Done:
    (victim / "link").symlink_to("file")
    return done_well("ls", "--json", "--volume", volume, swapped(victim)["id"])


def told_diff(volume: Path, victim: Path) -> Done:
    identifier = swapped(victim)["id"]
    (victim / "new").touch()
    return done_well("diff", "--json", "--volume", volume, identifier)


def told_keep_for_good(volume: Path, victim: Path) -> Done:
    return done_well("keep", "--json", "--volume", volume, swapped(victim)["id"])


def told_reap_dry(volume: Path, victim: Path) -> Done:
    swapped(victim)
    return done_well("reap", "--json", "--dry-run", "--all", "--now", "--volume", volume)


def told_reap_waited(volume: Path, victim: Path) -> Done:
    swapped(victim)
    return done_well("reap", "--json", "--all", "--now", "--wait", "--count", "--volume", volume)


def told_reap_pinned(volume: Path, victim: Path) -> Done:
    done_well("keep", "--volume", volume, swapped(victim)["id"])
    return done_well("reap", "--json", "--all", "--now", "--volume", volume)


def told_holders_of_some(_volume: Path, victim: Path) -> Done:
    with (victim / "file").open("rb"):
        return done_well("holders", "--json", victim)


def told_sweep(_volume: Path, victim: Path) -> Done:
    return done_well("sweep", "--json", victim, "--name", "f*")


def told_sweep_dry(_volume: Path, victim: Path) -> Done:
    return done_well("sweep", "--json", victim, "--name", "f*", "--dry-run")


def told_sweep_printed(_volume: Path, victim: Path) -> Done:
    return done_well("sweep", "--json", victim, "--name", "f*", "--print")


def told_plan_shown(volume: Path, victim: Path) -> Done:
    plan = volume / "plan.toml"
    plan.write_text(f'[[rule]]\ndirectory = "{victim}"\nname = "*"\n', encoding="utf-8")
    return done_well("plan", "show", "--json", plan)


def told_plan_wrong(volume: Path, _victim: Path) -> Done:
    plan = volume / "plan.toml"
    plan.write_text('[[rule]]\ndirectory = "/"\n', encoding="utf-8")
    done = trashd("plan", "check", "--json", plan)
    plan.unlink()
    return done


def told_status(volume: Path, victim: Path) -> Done:
    swapped(victim)
    with places() as base, service(base, volume):
        return done_well("status", "--json")


def told_pause(volume: Path, _victim: Path) -> Done:
    with places():
        return done_well("pause", "--json", "--for", "2h", volume)


def told_pause_of_all(_volume: Path, _victim: Path) -> Done:
    with places():
        return done_well("pause", "--json")


def told_resume(volume: Path, _victim: Path) -> Done:
    with places():
        done_well("pause", volume)
        return done_well("resume", "--json")


def told_service_install(volume: Path, _victim: Path) -> Done:
    return done_well("service", "install", "--json", "--dry-run", "--root", volume / "root")


def service_of_a_user(home: Path, *words: str) -> Done:
    return trashd("service", *words, "--user", HOME=str(home), XDG_DATA_HOME="", XDG_RUNTIME_DIR="")


def told_service_status(volume: Path, _victim: Path) -> Done:
    assert service_of_a_user(volume, "install").code == 0
    return service_of_a_user(volume, "status", "--json")


def told_service_uninstall(volume: Path, _victim: Path) -> Done:
    assert service_of_a_user(volume, "install").code == 0
    return service_of_a_user(volume, "uninstall", "--json")


def told_config_show(_volume: Path, _victim: Path) -> Done:
    return done_well("config", "show", "--json")


def told_config_show_of_path(volume: Path, _victim: Path) -> Done:
    return done_well("config", "show", "--json", volume)


def told_init_again(volume: Path, _victim: Path) -> Done:
    return done_well("init", "--json", volume)


SCENES: dict[str, tuple[Act, ...]] = {
    "swap": (golden.told_swap, golden.told_swap_now, told_swap_dry, told_swap_awaited_in_vain,
             told_swap_waited),
    "rm": (golden.told_rm, told_rm_now, told_rm_together),
    "list": (golden.told_list, told_list_dropped, told_list_unreadable, told_list_sized, golden.told_list_quarantined),
    "restore": (golden.told_restore, told_restore_rescued, golden.told_restore_quarantined),
    "undo": (told_undo,),
    "du": (told_du,),
    "ls": (told_ls,),
    "diff": (told_diff,),
    "keep": (golden.told_keep, told_keep_for_good),
    "reap": (
        golden.told_reap, golden.told_reap_quarantined, golden.told_reap_force, told_reap_dry, told_reap_waited,
        told_reap_pinned,
    ),
    "check": (golden.told_check, golden.told_check_refused),
    "holders": (golden.told_holders, told_holders_of_some),
    "sweep": (told_sweep, told_sweep_dry, told_sweep_printed),
    "plan show": (told_plan_shown,),
    "plan apply": (golden.told_plan,),
    "plan check": (told_plan_wrong,),
    "status": (told_status,),
    "doctor": (golden.told_doctor,),
    "init": (golden.told_init, told_init_again),
    "pause": (told_pause, told_pause_of_all),
    "resume": (told_resume,),
    "service install": (told_service_install,),
    "service status": (told_service_status,),
    "service uninstall": (told_service_uninstall,),
    "config check": (golden.told_config_check,),
    "config show": (told_config_show, told_config_show_of_path),
    ERROR: (golden.told_error,),
}  # fmt: skip
ON_A_MOUNT = {"status": ("status", "--json"), "mount": ("mount", "--explain", "--json")}


def test_every_command_with_json_has_a_schema_and_is_tried() -> None:
    commands = set(commands_with_json(group))
    assert commands | {ERROR} == set(printed())
    assert commands | {ERROR} == {*SCENES, *ON_A_MOUNT, "umount"}


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
@pytest.mark.parametrize(
    ("command", "act"),
    [
        pytest.param(command, act, id=f"{definition_of(command)}-{act.__name__.removeprefix('told_')}")
        for command, acts in SCENES.items()
        for act in acts
    ],
)
def test_what_a_command_prints_is_as_its_schema_says(volume: Path, command: str, act: Act) -> None:
    objects = act(volume, make_tree(volume / "victim", {"file": "content"})).objects()
    assert objects
    assert [complaints(command, told) for told in objects] == [[]] * len(objects)


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
