"""trashd config: check the configuration, and print the settings in force."""

from __future__ import annotations

import os
from collections.abc import Iterator

import click

from fusefs.cli import output
from fusefs.cli.group import OrderedGroup
from fusefs.cli.options import Decorator, PathBytes, json_option
from fusefs.core.config import Config, format_config, format_volume
from fusefs.core.errors import BadConfig, ConfigProblem, UsageError
from fusefs.core.policy import VolumePolicy
from fusefs.core.printable_names import printable
from fusefs.linux.config_files import SYSTEM_DIR, LoadedConfig, check_files, config_dir, load_config, load_system_config
from fusefs.linux.mountinfo import is_inside, read_mounts
from fusefs.linux.user_ids import uid_of

_system_option: Decorator = click.option(
    "--system", is_flag=True, help="Use the configuration of root's service (the default for root)."
)


@click.group("config", cls=OrderedGroup, short_help="Check the reaper service's configuration; print the settings.")
def command() -> None:
    """Check the configuration of the reaper service, and print the settings in force.

    Root's service reads /etc/trashd/config.toml, then /etc/trashd/config.d/*.toml, sorted by name. A user's own service
    reads ~/.config/trashd/ instead. If two files set the same key, the later one wins. trashd.conf(5) describes the
    keys.

    \b
    Examples:
      trashd config check && systemctl reload trashd-reaper
      trashd config show --system /scratch/job
    """


@command.command("check", short_help="Report problems in the configuration.")
@click.argument("files", type=PathBytes(), nargs=-1, metavar="[FILE]…")
@_system_option
@json_option
def check_command(files: tuple[bytes, ...], system: bool, as_json: bool) -> int:
    """Check the configuration in force, or the given FILEs, and report each problem with its file, its key and a fix.

    Problems include invalid values, unknown keys, TOML syntax errors, and users or commands that don't exist on this
    machine. Without FILE, check also reports files that users other than you and root can change. If any problem is an
    error rather than a warning, the exit code is 2; the service would reject this configuration and keep its previous
    one.

    \b
    Examples:
      trashd config check
      trashd config check draft.toml
      trashd config check --json | jq .what
    """
    if files and system:
        raise UsageError("FILE can't be combined with --system")
    problems: tuple[ConfigProblem, ...] = ()
    loaded = None
    try:
        loaded = check_files(files) if files else _load(system=system)
        problems = (*loaded.warnings, *_missing(loaded))
    except BadConfig as error:
        problems = error.problems
    for problem in problems:
        output.print_finding(problem, as_json=as_json)
    if loaded is not None and not problems and not as_json:
        for file in loaded.files:
            print(f"{printable(file)}: no problems")
        if not loaded.files:
            place = SYSTEM_DIR if system else config_dir() or b"~"
            print(f"{printable(place)}: no configuration; the defaults are in force")
    return 0 if all(problem.is_warning for problem in problems) else BadConfig.exit_code


def problems_in_force() -> tuple[ConfigProblem, ...]:
    """Return the problems in the caller's configuration; for root, in the system's configuration."""
    try:
        loaded = _load(system=os.geteuid() == 0)
        return (*loaded.warnings, *_missing(loaded))
    except BadConfig as error:
        return error.problems


def _load(*, system: bool) -> LoadedConfig:
    return load_system_config() if system else load_config()


def _missing(loaded: LoadedConfig) -> Iterator[ConfigProblem]:
    """Find users and programs that the configuration names but that do not exist on this machine."""
    for key, setting in loaded.settings.items():
        match key[-1]:
            case "users" | "user":
                names = (setting.value,) if key[-1] == "user" else setting.value
                for name in names:
                    try:
                        uid_of(name)
                    except ValueError:
                        fix = "write the name of a user on this machine, or a uid"
                        yield setting.place.problem(f"no such user: {printable(name.encode())}", fix)
            case str(name) if name.startswith("on_") and setting.value is not None:
                program = setting.value[0]
                if not (os.path.isfile(program) and os.access(program, os.X_OK)):
                    what = f"{printable(program.encode())} can't be executed"
                    yield setting.place.problem(what, "name an existing program that has execute permission")


@command.command("show", short_help="Print the settings in force.")
@click.argument("path", type=PathBytes(), required=False, metavar="[PATH]")
@_system_option
@json_option
def show_command(path: bytes | None, system: bool, as_json: bool) -> int:
    """Print the configuration in force as TOML. If PATH is a volume, print the settings of that volume; otherwise print
    the settings for orphans that came from PATH.

    For each value that is not the default, a comment names the file that sets it. With --json, each key name ends with
    the unit of its value.

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
        text = format_config(loaded.config, loaded.settings)
    else:
        path = os.path.realpath(path)
        # The volume is the mount point of the path's filesystem, or a directory in it that has its own [[volume]].
        points = [*(mount.point for mount in read_mounts()), *(volume.path for volume in loaded.config.volumes)]
        point = max((point for point in points if is_inside(path, point)), key=len, default=b"/")
        policy = volume = loaded.config.policy_of(point)
        if not os.path.lexists(path):
            output.warn(f"{printable(path)}: does not exist; these are the settings for {printable(volume.path)}")
        if path == volume.path:
            text = format_volume(volume, loaded.settings)
        else:
            policy = volume._replace(rules=volume.rules_for(path), paths=())
            text = f"# for {printable(path)}\n{format_volume(volume, loaded.settings, path)}"
    if as_json:
        output.as_json(policy)
    else:
        print(text, end="")
    return 0
