"""trashd config: is it right, and what is in force."""

from __future__ import annotations

import os
from collections.abc import Iterator

import click

from fusefs.cli import output
from fusefs.cli.group import OrderedGroup
from fusefs.cli.options import Decorator, PathBytes, json_option
from fusefs.core.config import Config, tell_config, tell_volume
from fusefs.core.errors import BadConfig, ConfigProblem, UsageError
from fusefs.core.policy import VolumePolicy
from fusefs.core.printable_names import printable
from fusefs.linux.config_files import SYSTEM_DIR, Loaded, check_files, config_dir, load_config, load_system_config
from fusefs.linux.mountinfo import is_inside, read_mounts
from fusefs.linux.user_ids import uid_of

_system_option: Decorator = click.option(
    "--system", is_flag=True, help="What is in force for root's service, which serves everybody; root's default."
)


@click.group("config", cls=OrderedGroup, short_help="Check the reaper's configuration; show what is in force.")
def command() -> None:
    """Check the reaper service's configuration, and show what is in force.

    The system's is /etc/trashd/config.toml, then /etc/trashd/config.d/*.toml, sorted by name; that of your own
    service, if you are not root, is in ~/.config/trashd/ ($XDG_CONFIG_HOME). Of two files that set the same key the
    later wins. Without any of them the defaults are in force: `trashd config show` states them.

    \b
    Examples:
      trashd config check && systemctl reload trashd-reaper
      trashd config show --system /scratch/job
    """


@command.command("check", short_help="Say what is wrong in it.")
@click.argument("files", type=PathBytes(), nargs=-1, metavar="[FILE]…")
@_system_option
@json_option
def check_command(files: tuple[bytes, ...], system: bool, as_json: bool) -> int:
    """Check the configuration in force, or FILEs alone, such as a draft: each problem with file, key and fix.

    Values that can't be, keys that nobody knows, and texts that are no TOML are found; users and commands that this
    machine doesn't have, too. In the files in force, also those that somebody else than root could change. Exit code
    2 if there is any problem: the service would go on with the configuration that it has.

    \b
    Examples:
      trashd config check
      trashd config check draft.toml
      trashd config check --json | jq .what
    """
    if files and system:
        raise UsageError("FILE with --system", "it is one or the other")
    problems: tuple[ConfigProblem, ...] = ()
    loaded = None
    try:
        loaded = check_files(files) if files else _load(system=system)
        problems = (*loaded.warnings, *_missing(loaded))
    except BadConfig as error:
        problems = error.problems
    for problem in problems:
        output.tell_problem(problem, as_json=as_json)
    if loaded is not None and not problems and not as_json:
        for file in loaded.files:
            print(f"{printable(file)}: no problems")
        if not loaded.files:
            place = SYSTEM_DIR if system else config_dir() or b"~"
            print(f"there is no configuration in {printable(place)}: the defaults are in force")
    return 0 if all(problem.is_warning for problem in problems) else BadConfig.exit_code


def problems_in_force() -> tuple[ConfigProblem, ...]:
    """What is wrong in the caller's configuration, which is the system's for root."""
    try:
        loaded = _load(system=os.geteuid() == 0)
        return (*loaded.warnings, *_missing(loaded))
    except BadConfig as error:
        return error.problems


def _load(*, system: bool) -> Loaded:
    return load_system_config() if system else load_config()


def _missing(loaded: Loaded) -> Iterator[ConfigProblem]:
    """What is right in itself, and not to be had on this machine."""
    for key, setting in loaded.settings.items():
        match key[-1]:
            case "users" | "user":
                names = (setting.value,) if key[-1] == "user" else setting.value
                for name in names:
                    try:
                        uid_of(name)
                    except ValueError:
                        fix = "name a user that this machine knows, or a uid"
                        yield setting.place.problem(f"there is no user {printable(name.encode())}", fix)
            case str(name) if name.startswith("on_") and setting.value is not None:
                program = setting.value[0]
                if not (os.path.isfile(program) and os.access(program, os.X_OK)):
                    what = f"{printable(program.encode())} can't be executed"
                    yield setting.place.problem(what, "name a program that exists, with its x bit set")


@command.command("show", short_help="Print what is in force.")
@click.argument("path", type=PathBytes(), required=False, metavar="[PATH]")
@_system_option
@json_option
def show_command(path: bytes | None, system: bool, as_json: bool) -> int:
    """Print the configuration in force as TOML; with PATH what holds for that volume, or for what is swapped there.

    Behind each value that is no default stands where it comes from. With --json all values are in the units that
    their names end with.

    \b
    Examples:
      trashd config show
      trashd config show /scratch/ci/workspace
    """
    loaded = _load(system=system)
    for warning in loaded.warnings:
        output.warn(str(warning))
    policy: Config | VolumePolicy = loaded.config
    if path is None:
        text = tell_config(loaded.config, loaded.settings)
    else:
        path = os.path.realpath(path)
        # Where the filesystem of the path is mounted, or the part of it that the configuration names.
        points = [*(mount.point for mount in read_mounts()), *(volume.path for volume in loaded.config.volumes)]
        point = max((point for point in points if is_inside(path, point)), key=len, default=b"/")
        policy = volume = loaded.config.volume(point)
        if not os.path.lexists(path):
            output.warn(f"{printable(path)} does not exist: this is what holds for {printable(volume.path)}")
        if path == volume.path:
            text = tell_volume(volume, loaded.settings)
        else:
            policy = volume._replace(rules=volume.rules_for(path), paths=())
            text = f"# for {printable(path)}\n{tell_volume(volume, loaded.settings, path)}"
    if as_json:
        output.as_json(policy)
    else:
        print(text, end="")
    return 0
