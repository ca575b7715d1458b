"""trashd swap, and trashd check, which prints the preflight of a swap as --dry-run does."""

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
from fusefs.store.check_swap import Preflight, check_swap
from fusefs.store.stage import SwapOptions
from fusefs.store.swap import Swapped, swap_path

_WAIT = "--wait"
_DONE = "done"
"""The goal of a bare `--wait`: that all trees are deleted."""


class _WaitOption(click.Option):
    """The option `--wait[=SIZE]`, whose value is optional; a directory after it is not mistaken for the value."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Format the help of this option without the space that click puts before a value."""
        record = super().get_help_record(ctx)
        return record and (record[0].replace(" [=", "[="), record[1])


class _SwapCommand(Command):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Add the default value to a bare `--wait`; otherwise click would take the next argument as the value."""
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
    """Parse the goal: the number of bytes that have to become free, or 0 for `done`. Raises  ValueError"""
    return 0 if text == _DONE else parse_size(text)


def _is_goal(word: str = "") -> bool:
    """Return whether an argument after `--wait` is its value: a valid goal, and not the name of an existing file."""
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
    help="Do not retain the old trees; wait until they are deleted, or until SIZE more space is free.",
)


@click.command(
    "swap",
    cls=_SwapCommand,
    short_help="Swap a directory for an empty one, keeping the old tree in the trash.",
    headings={
        "Select": "--keep --null",
        "Act": "--keep-for --note --unlike --for-owner --now --wait --dry-run",
        "Output": "--print-id --json",
    },
)
@click.argument("directories", type=PathBytes(), nargs=-1, metavar="DIR…")
@null_option
@click.option("-n", "--dry-run", "dry", is_flag=True, help="Only print what a swap would do, as trashd check does.")
@click.option(
    "--keep",
    "keep",
    multiple=True,
    metavar="GLOB",
    help="Keep entries at the top level of DIR in place if they match GLOB (repeatable).",
)
@click.option("--keep-for", type=DURATION, help="Keep the old tree restorable for DURATION. [default: 24h]")
@click.option("--note", type=NOTE, default="", help="Store TEXT as a note with the orphan.")
@click.option(
    "--unlike",
    is_flag=True,
    help="Swap even if the new directory can't be given all of the old one's attributes; encryption is never dropped.",
)
@click.option(
    "--for-owner", is_flag=True, help="As root, give the orphan to the owner of DIR, who can then restore it."
)
@click.option("--now", is_flag=True, help="Delete the old tree at once, in the foreground.")
@_wait_option
@click.option("--print-id", is_flag=True, help="Print only the ID of each orphan, one per line, for scripts.")
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
    """Replace each DIR with an empty directory, keeping the old tree in the trash.

    The new directory has the same owner, mode, ACLs, xattrs and project ID. The swap is one atomic exchange, so the
    name is never missing. On NFS, Lustre, BeeGFS and CephFS it takes two renames, and the name is missing in between.

    The old tree, called an orphan, can be restored until it expires. Processes that have files open in it keep using
    them. The space used by the old tree is freed when the reaper deletes it.

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
        for other in (option for option, is_given in beside.items() if is_given):
            raise ids_with(other)
    if dry:
        return _print_preflights(paths, as_json=as_json, keep=keep, unlike=unlike)
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
        raise UsageError(
            "--now can't be combined with --wait=SIZE", "--now --wait waits until all of the space is free"
        )
    from fusefs.cli.wait import swap_and_wait

    return swap_and_wait(batch, goal_bytes, keep_for or 0)


def _verb(*, for_owner: bool, now: bool) -> SwapVerb:
    if not for_owner:
        return swap_path
    if os.geteuid() != 0:
        raise NotPermitted("--for-owner", "only root can give an orphan to another user")
    if now:
        raise UsageError("--now can't be combined with --for-owner")
    from fusefs.store.as_owner import swap_for_owner

    return swap_for_owner


@click.command("check", cls=Command, short_help="Check whether and how directories can be swapped.")
@click.argument("paths", type=PathBytes(), nargs=-1, metavar="DIR…", required=True)
@json_option
def check_command(paths: tuple[bytes, ...], as_json: bool) -> int:
    """Print whether and how each DIR can be swapped, without swapping it. The exit code is the one that the swap would
    return.

    To test the exchange, check creates two empty directories, one next to DIR and one in its trash store, exchanges
    them, and removes them. DIR itself stays in place, and its contents are not touched.

    The output also lists system calls that this kernel or container lacks, and the consequences. If the exchange can't
    be atomic, or the filesystem is shared, the output explains what this means for a swap.

    \b
    Examples:
      trashd check /scratch/job
      trashd check --json /scratch/*/
    """
    return _print_preflights(paths, as_json=as_json)


def _print_preflights(
    paths: Iterable[bytes], *, as_json: bool, keep: tuple[str, ...] = (), unlike: bool = False
) -> int:
    """Check each directory and print the result; return the exit code that a swap of all of them would return."""
    kernel = Kernel()
    codes = []
    for path in paths:
        try:
            result = check_swap(kernel, path, keep, accept_differences=unlike)
            pids = {holder.pid for held in holders_of([result.path]) for holder in held.holders}
            result = result._replace(n_holders=len(pids))
        except TrashdError as error:
            codes.append(output.print_error(error, as_json=as_json))
            continue
        if as_json:
            output.as_json(result)
        else:
            _print_preflight(result)
        codes.append(result.exit_code)
    return output.exit_code(codes)


def _print_preflight(result: Preflight) -> None:
    print(f"{printable(result.path)}: {'can NOT be swapped' if result.refusals else 'can be swapped'}")
    print(f"  volume   {printable(result.mount_point)} ({result.filesystem})")
    if result.store is not None:
        print(f"  store    {printable(result.store)}{'' if result.exists else ' (would be created)'}")
    gap = "" if result.gap_ns is None else f" ({result.gap_ns / 1e6:.2f} ms in this test)"
    how = {"exchange": "one atomic exchange", "two-rename": f"two renames: the name is missing for a moment{gap}"}
    if result.method in how:
        print(f"  method   {how[result.method]}")
    if result.takeover_s is not None:
        print(f"  nodes    another node's operation is taken over after {result.takeover_s:g} s without progress")
    if result.project:
        print(f"  project  {result.project}: its quota includes the orphan until the orphan is deleted")
    if result.unlike:
        print(f"  unlike   the new directory would have {', '.join(result.unlike)}")
    if result.kept:
        print(f"  keep     {output.names(result.kept)}")
    if result.n_holders:
        holders = output.counted(result.n_holders, "process", "processes")
        print(f"  holders  {holders} (trashd holders {shell_word(result.path)})")
    for missing in result.missing:
        print(f"  missing  {missing.call} ({missing.errno}): {missing.cost}")
    for message, hint in result.refusals:
        print(f"  problem  {message}\n           {hint}")
