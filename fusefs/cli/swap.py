"""trashd swap, and trashd check: a swap's preflight, printed, as by --dry-run."""

from __future__ import annotations

import os
from collections.abc import Iterable

import click

from fusefs.cli import output
from fusefs.cli.holders import holders_of
from fusefs.cli.options import DURATION, NOTE, Command, Decorator, ParsedValue, PathBytes, json_option, null_option
from fusefs.cli.swap_paths import SwapBatch, SwapVerb, every_path, ids_with, swap_all
from fusefs.core.container_states import DEFAULT_RETENTION_S
from fusefs.core.errors import NotPermitted, TrashdError, UsageError
from fusefs.core.human_units import parse_size
from fusefs.core.printable_names import printable, shell_word
from fusefs.linux.kernel import Kernel
from fusefs.store.check_swap import Preflight, preflight
from fusefs.store.stage import SwapOptions
from fusefs.store.swap import Swapped, swap_path

_WAIT = "--wait"
_DONE = "done"
"""The goal of a bare `--wait`: all trees are gone."""


class _WaitOption(click.Option):
    """`--wait[=SIZE]`: its value may be left out, and it takes no directory for it."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Its line in the help, without the space that click puts before a value."""
        record = super().get_help_record(ctx)
        return record and (record[0].replace(" [=", "[="), record[1])


class _SwapCommand(Command):
    """A command with `--wait[=SIZE]`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Give a bare `--wait` its value. click's optional values would take the next argument, a directory, for it."""
        options = [one for one in self.params if isinstance(one, click.Option) and not one.is_flag]
        with_value = {name for option in options for name in option.opts}
        words, at = list(args), 0
        while at < len(words) and words[at] != "--":
            if words[at] == _WAIT:
                goal = words[at + 1 : at + 2] if _is_goal(*words[at + 1 : at + 2]) else []
                words[at : at + 1 + len(goal)] = [f"{_WAIT}={''.join(goal) or _DONE}"]
            elif words[at] in with_value:
                at += 1
            at += 1
        return super().parse_args(ctx, words)


def _parse_goal(text: str) -> int:
    """Parse the bytes that have to come back; 0 for `done`. Raises  ValueError"""
    return 0 if text == _DONE else parse_size(text)


def _is_goal(word: str = "") -> bool:
    """Whether an argument after `--wait` is its value: a goal, and not the name of a file here."""
    try:
        _parse_goal(word)
    except ValueError:
        return False
    return not os.path.lexists(word)


_wait_option: Decorator = click.option(
    _WAIT,
    "goal_bytes",
    cls=_WaitOption,
    type=ParsedValue("goal", _parse_goal),
    metavar="[=SIZE]",
    help="Give up its retention, and wait until all trees are gone, or until SIZE more is free: 100G.",
)


@click.command(
    "swap",
    cls=_SwapCommand,
    short_help="Put a fresh, empty directory in the place of each.",
    no_args_is_help=True,
)
@click.argument("directories", type=PathBytes(), nargs=-1, metavar="DIR…")
@null_option
@click.option("-n", "--dry-run", "dry", is_flag=True, help="Only say what would be done, and what stands against it.")
@click.option(
    "--keep",
    "keep",
    multiple=True,
    metavar="GLOB",
    help="Leave what in the top of DIR has such a name in view: files by a hard link, directories by a rename "
    "right after the exchange (may be repeated).",
)
@click.option("--keep-for", type=DURATION, help="Restorable that long (24h).")
@click.option("--note", type=NOTE, default="", help="A sentence kept with the orphan.")
@click.option("--unlike", is_flag=True, help="Accept a fresh directory that differs; encryption is never dropped.")
@click.option("--for-owner", is_flag=True, help="As root: give the orphan to the directory's owner to restore.")
@click.option("--now", is_flag=True, help="Don't keep it: reap it at once, in the foreground.")
@_wait_option
@click.option("--print-id", is_flag=True, help="Print the orphan's id and nothing else, a line each: for scripts.")
@json_option
def command(
    directories: tuple[bytes, ...],
    null: bool,
    dry: bool,
    keep: tuple[str, ...],
    keep_for: int | None,
    note: str,
    unlike: bool,
    for_owner: bool,
    now: bool,
    goal_bytes: int | None,
    print_id: bool,
    as_json: bool,
) -> int:
    """Put a fresh, empty directory in each DIR's place by one atomic exchange.

    It has the same owner, mode, ACLs, xattrs and project id. DIR's name never disappears. Who has files of the
    old tree open keeps them, and space comes back when the reaper frees them.

    With --keep some of what is in the top of DIR stays in view. Files are in the old tree as well, by a hard link; a
    restore takes directories back into it. A GLOB that matches nothing is refused.

    \b
    Examples:
      trashd swap /scratch/job
      trashd swap --keep-for 3d --note "before the upgrade" build/
      trashd swap --keep '*.conf' --keep licences /srv/app
      find /scratch -maxdepth 1 -name 'tmp.*' -print0 | trashd swap -0
      id=$(trashd swap --print-id build/) && make || trashd restore "$id"
      trashd swap --now cache/
      trashd swap --wait=100G /scratch/job && run-the-next-one
    """
    paths = every_path(directories, null=null)
    if print_id:
        beside = {"--json": as_json, "--dry-run": dry, "--now": now, "--wait": goal_bytes is not None}
        for other in (option for option, is_told in beside.items() if is_told):
            raise ids_with(other)
    if dry:
        return _tell_preflight(paths, as_json=as_json, keep=keep, unlike=unlike)
    verb = _verb(for_owner=for_owner, now=now)
    is_given_up = goal_bytes is not None and not keep_for
    retention_s = DEFAULT_RETENTION_S if keep_for is None or is_given_up else keep_for
    options = SwapOptions(retention_s, note, unlike, keep)
    batch = SwapBatch(paths, options, verb, as_json, print_id, not now and not is_given_up)

    def after(swapped: Swapped) -> int:
        if not now:
            return 0
        from fusefs.cli.reap import reap_one

        return reap_one(swapped.base(), swapped.id, as_json=as_json, waits=goal_bytes is not None)

    batch = batch._replace(after=after)
    if goal_bytes is None or (now and not goal_bytes):
        return swap_all(batch)
    if now:
        raise UsageError("--now with --wait=SIZE", "--now waits for all of it, or not at all")
    from fusefs.cli.wait import swap_and_wait

    return swap_and_wait(batch, goal_bytes, keep_for or 0)


def _verb(*, for_owner: bool, now: bool) -> SwapVerb:
    if not for_owner:
        return swap_path
    if os.geteuid() != 0:
        raise NotPermitted("--for-owner", "only root can give an orphan to somebody else")
    if now:
        raise UsageError("--now with --for-owner", "leave one of them out")
    from fusefs.store.as_owner import swap_for_owner

    return swap_for_owner


@click.command("check", cls=Command, short_help="Say what a swap would do, without doing it.", no_args_is_help=True)
@click.argument("paths", type=PathBytes(), nargs=-1, metavar="DIR…")
@json_option
def check_command(paths: tuple[bytes, ...], as_json: bool) -> int:
    """Say what a swap of each directory would do, without doing it; the exit code is the one that swap would have.

    What only trying tells is tried: empty directories are made beside DIR and where its store is or would be, and
    removed again. DIR stays where it is, and what is in it is not touched.
    System calls that this kernel or container lacks are named, and what that costs; where there is no exchange, or
    other machines may have the filesystem mounted, what follows from that.

    \b
    Examples:
      trashd check /scratch/job
      trashd check --json /scratch/*/
    """
    return _tell_preflight(every_path(paths, null=False), as_json=as_json)


def _tell_preflight(paths: Iterable[bytes], *, as_json: bool, keep: tuple[str, ...] = (), unlike: bool = False) -> int:
    """Look at each directory and print it; the exit code that a swap of them would have."""
    kernel = Kernel()
    codes = []
    for path in paths:
        try:
            found = preflight(kernel, path, keep, unlike=unlike)
            pids = {holder.pid for held in holders_of([found.path]) for holder in held.holders}
            found = found._replace(n_holders=len(pids))
        except TrashdError as error:
            codes.append(output.failed(error, as_json=as_json))
            continue
        if as_json:
            output.as_json(found)
        else:
            _tell(found)
        codes.append(found.exit_code)
    return output.exit_code(codes)


def _tell(found: Preflight) -> None:
    print(f"{printable(found.path)}: {'can NOT be swapped' if found.refusals else 'can be swapped'}")
    print(f"  volume   {printable(found.mount_point)} ({found.filesystem})")
    if found.store is not None:
        print(f"  store    {printable(found.store)}{'' if found.exists else ' (would be made)'}")
    gap = "" if found.gap_ns is None else f" ({found.gap_ns / 1e6:.2f} ms just now)"
    how = {"exchange": "one atomic exchange", "two-rename": f"two renames: the name is missing for a moment{gap}"}
    if found.method in how:
        print(f"  method   {how[found.method]}")
    if found.takeover_s is not None:
        print(f"  nodes    a killed command of another node is taken over after {found.takeover_s:g} s of silence")
    if found.project:
        print(f"  project  {found.project}: its quota counts the orphan until it is reaped")
    if found.unlike:
        print(f"  unlike   the fresh directory would have {', '.join(found.unlike)}")
    if found.kept:
        print(f"  keep     {output.names(found.kept)}")
    if found.n_holders:
        holders = output.counted(found.n_holders, "process", "processes")
        print(f"  holders  {holders} (trashd holders {shell_word(found.path)})")
    for missing in found.missing:
        print(f"  missing  {missing.call} ({missing.errno}): {missing.cost}")
    for message, hint in found.refusals:
        print(f"  against  {message}\n           {hint}")
