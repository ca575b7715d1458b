"""trashd plan: print what rules would do, or carry them out, with a result for each directory that has matches."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout, suppress
from typing import Any

import click

from fusefs.cli import output, sweep
from fusefs.cli.group import OrderedGroup
from fusefs.cli.json_objects import PlannedRule, RuleLeftUndone, SweepAction, WrittenPurgeLists
from fusefs.cli.options import AgeCutoffs, PathBytes, json_option, tempo_options
from fusefs.cli.stop_signals import StopSignals
from fusefs.core.errors import BadConfig, ConfigProblem, Incomplete, Refused, TrashdError, Unsettled
from fusefs.core.human_units import format_size
from fusefs.core.pacing import Speed
from fusefs.core.plan_rules import (
    DeleteAction,
    MoveAction,
    PurgeListsResult,
    Rule,
    RuleOutcome,
    RuleResult,
    SkippedRule,
    TrashAction,
)
from fusefs.core.printable_names import printable, shell_word
from fusefs.core.results import Swept
from fusefs.linux.children import ask_each
from fusefs.linux.config_files import is_drop_in, load_plan, plan_dir
from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import covering_mount_id, read_mounts

_NO_DIRECTORY = b"no directory"


class _PlanGroup(OrderedGroup):
    """A group whose default command is `show`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert the default command if none is named. Raises  UsageError if the first word resembles a command"""
        first = args[0] if args else ""
        is_completed = ctx.resilient_parsing and not args  # the shell completes the commands
        if is_completed or first in self.commands or first in ctx.help_option_names:
            return super().parse_args(ctx, args)
        if (
            first
            and not first.startswith("-")
            and not os.path.lexists(first)
            and (similar := self.suggestions(ctx, first))
        ):
            ctx.fail(f"No such command or file {first!r}. Did you mean {similar}?")
        return super().parse_args(ctx, ["show", *args])


_plans_argument = click.argument("files", type=PathBytes(), nargs=-1, metavar="[PLAN]…")


@click.group("plan", cls=_PlanGroup, short_help="Trash, delete or move files by rules in plan files.")
def command() -> None:
    """Trash, delete or move files by rules such as "files below /scratch that have not changed for 30 days".

    A PLAN is a TOML file, or a directory of *.toml files. If no PLAN is given, plan reads /etc/trashd/plan.d for root,
    and ~/.config/trashd/plan.d for other users. trashd-sweep.timer applies root's plans every night. If a file has an
    error, plan prints the key at fault and does nothing.

    Rules skip directories that contain a file named .trashd-keep, and anything locked with flock(2).

    \b
    Examples:
      trashd plan show scratch.toml
      trashd plan apply --paced
    """


@command.command("show", short_help="Print what the rules would do now.")
@_plans_argument
@tempo_options
@json_option
def show_command(**options: Any) -> int:
    """Print what each rule would do now: counts, bytes, the largest and the oldest matches. Nothing is changed.

    \b
    Examples:
      trashd plan show
      trashd plan show draft.toml
    """
    return _plan(**options, runs=False)


@command.command("apply", short_help="Carry out the rules.")
@_plans_argument
@tempo_options
@json_option
def apply_command(**options: Any) -> int:
    """Carry out the rules in each PLAN, or in your own plan files if no PLAN is given, and print the results.

    Plan files must belong to you or root, and must not be writable by anyone else.

    \b
    Examples:
      trashd plan apply --paced
      trashd plan apply --max-rate 5000/s scratch.toml
    """
    return _plan(**options, runs=True)


@command.command("check", short_help="Check plan files for errors.")
@_plans_argument
@json_option
def check_command(files: tuple[bytes, ...], as_json: bool) -> int:
    """Check plan files for errors. `trashd doctor` also checks your own plan files.

    \b
    Examples:
      trashd plan check draft.toml
    """
    warnings: list[ConfigProblem] = []
    cutoffs, paths = AgeCutoffs(Kernel(), notes=False), files or _own()
    try:
        rules = load_plan(paths, cutoffs.now.wall_ns, cutoffs.ago, warnings.append, is_trusting=bool(files))
    except BadConfig as error:
        _print_problems(error.problems, as_json=as_json, is_result=True)
        return BadConfig.exit_code
    _print_problems(warnings, as_json=as_json, is_result=True)
    if not as_json and not warnings:
        print(f"{output.counted(len(rules), 'rule')}, no problems") if rules else _print_no_rules(paths)
    return 0


def problems_in_plans() -> tuple[ConfigProblem, ...]:
    """Find problems in the caller's rules; for root, in the system's rules."""
    warnings: list[ConfigProblem] = []
    try:
        cutoffs = AgeCutoffs(Kernel(), notes=False)
        rules = load_plan(_own(), cutoffs.now.wall_ns, cutoffs.ago, warnings.append, is_trusting=False)
    except BadConfig as error:
        return error.problems
    return (*warnings, *refused_rules(rules, cutoffs.now.wall_ns))


def has_plans() -> bool:
    """Return whether the caller has any plan files, valid or not."""
    with suppress(OSError):  # reported as a problem
        return any(is_drop_in(name) for own in _own() for name in os.listdir(own))
    return False


def refused_rules(rules: Sequence[Rule], now_ns: int) -> Iterator[ConfigProblem]:
    """Find rules whose directory is missing or records no access times. Skip patterns, which might match later."""
    from fusefs.sweep.open_directories import has_wildcards

    mounts = read_mounts()
    named = [rule for rule in rules if not has_wildcards(rule.directory)]
    # Child processes check the directories, since a directory may hang; the check of the stores reports that.
    answers = ask_each(
        named, lambda rule: _why_refused(rule, now_ns), set(), lambda rule: covering_mount_id(rule.directory, mounts)
    )
    for rule, answer in answers:
        if answer == _NO_DIRECTORY:
            fix = "name an existing directory, or remove the rule"
            yield rule.place.problem(f"{printable(rule.directory)}: not a directory", fix)
        elif answer:
            fix = "use another time, mount the filesystem with relatime, or set trusts_atime = true"
            yield rule.place.problem(answer.decode(), fix)


def _why_refused(rule: Rule, now_ns: int) -> bytes:
    """Return the reason why a rule would be refused, or an empty value if it would be carried out."""
    from fusefs.store.victim import find_scope
    from fusefs.sweep.request import refuse_stale

    if not os.path.isdir(rule.directory):
        return _NO_DIRECTORY
    try:
        if not rule.trusts_atime:
            with find_scope(Kernel(), rule.directory) as scope:
                refuse_stale(scope, rule.times(), now_ns, takes_dirs=rule.uses_directory_times(), key="trusts_atime")
    except Refused as error:
        return error.detail.encode()
    except (OSError, TrashdError):
        pass  # trashd plan show reports it
    return b""


def _plan(
    files: tuple[bytes, ...], max_rate: int | None, max_bytes: int | None, paced: bool, as_json: bool, runs: bool
) -> int:
    cutoffs, paths = AgeCutoffs(Kernel(), notes=runs), files or _own()
    try:
        # The draft of any user may be shown; rules that are carried out must belong to the caller or root.
        is_trusting = bool(files) and not runs
        rules = load_plan(
            paths, cutoffs.now.wall_ns, cutoffs.ago, lambda one: output.warn(str(one)), is_trusting=is_trusting
        )
    except BadConfig as error:
        _print_problems(error.problems, as_json=as_json, is_result=False)
        return BadConfig.exit_code
    if not rules and not as_json:
        _print_no_rules(paths)
    cutoffs.warn_of_clock()
    from fusefs.plan.run_plan import PlanOptions, carry_out
    from fusefs.sweep.request import SweepOptions

    report, most = _PlanReport(files, runs=runs, as_json=as_json), Speed(max_rate, max_bytes)
    with StopSignals() as stop:
        why = output.print_pace if paced else None
        how = PlanOptions(runs, cutoffs.now.wall_ns, SweepOptions(stops=stop), most, why)
        for outcome in carry_out(Kernel(), rules, how):
            report.print_outcome(outcome)
        report.print_sum()
        return stop.exit_code() if stop() else report.exit_code()


def _print_no_rules(paths: Sequence[bytes]) -> None:
    where = ", ".join(map(printable, paths)) or f"{printable(plan_dir() or b'~')}"
    click.echo(f"{where}: no rules found", err=True)


def _own() -> tuple[bytes, ...]:
    """Return the directory of this user's plans, if it exists."""
    own = plan_dir()
    return (own,) if own is not None and os.path.isdir(own) else ()


def _print_problems(problems: Sequence[ConfigProblem], *, as_json: bool, is_result: bool) -> None:
    """Print each problem, either as the command's result or as the reason why nothing is done."""
    with redirect_stdout(sys.stdout if is_result else sys.stderr):
        for problem in problems:
            output.print_finding(problem, as_json=as_json)
        if not is_result and not as_json:
            print("trashd: nothing was done")


class _PlanReport:
    """Prints outcomes one by one, then the sum, and computes the exit code."""

    def __init__(self, files: Sequence[bytes], *, runs: bool, as_json: bool) -> None:
        """files: the plans that the user named"""
        self._files = files
        self._runs = runs
        self._as_json = as_json
        self._codes: list[int] = []
        self._n_directories = 0
        self._n_matches = 0
        self._n_bytes = 0

    def print_outcome(self, outcome: RuleOutcome) -> None:
        match outcome:
            case RuleResult(rule, swept):
                self._print_done(rule, swept)
            case SkippedRule():
                self._print_not_done(outcome)
            case PurgeListsResult():
                self._print_lists(outcome)

    def print_sum(self) -> None:
        if self._as_json:
            return
        size = f" ({format_size(self._n_bytes)})" if self._n_bytes else ""
        where = output.counted(self._n_directories, "directory", "directories")
        what = f"{output.counted(self._n_matches, 'match', 'matches')}{size} in {where}"
        apply = " ".join(["trashd plan apply", *map(shell_word, self._files)])
        print(f"{what} processed" if self._runs else f"{what} would be processed; to carry this out, run: {apply}")

    def exit_code(self) -> int:
        """Return the exit code of a single error, or Incomplete's for several errors."""
        return output.exit_code([code for code in self._codes if code] or [0])

    def _print_done(self, rule: Rule, swept: Swept) -> None:
        sums = swept.sums
        self._n_directories += sums.n_done > 0
        self._n_matches += sums.n_done
        self._n_bytes += sums.n_bytes if swept.looks else 0
        is_short = bool(sums.n_failed or swept.is_limited or swept.why)
        self._codes.append(Unsettled.exit_code if swept.warnings else Incomplete.exit_code if is_short else 0)
        action, did = _action(rule)
        if self._as_json:
            sweep.as_json(SweepAction(action, not self._runs), swept, PlannedRule(str(rule.place)))
        elif sums.n_matched or sums.n_spared or sums.n_mounts or is_short:
            first, *others = sweep.result_lines(swept, did if self._runs else f"would be {did}")
            print("\n".join([f"{rule.place}: {first}", *others]))
        for warning in swept.warnings:
            output.warn(warning)

    def _print_not_done(self, outcome: SkippedRule) -> None:
        error = outcome.error
        self._codes.append(0 if error is None else error.exit_code)
        if self._as_json:
            name = None if error is None else type(error).__name__
            output.as_json(RuleLeftUndone(str(outcome.rule.place), outcome.directory, outcome.why, name))
            return
        print(f"{outcome.rule.place}: {printable(outcome.directory)}: {outcome.why}")
        if error is not None and error.hint:
            print(f"  hint: {error.hint}")

    def _print_lists(self, lists: PurgeListsResult) -> None:
        if lists.error is not None:
            self._codes.append(output.print_error(lists.error, as_json=self._as_json))
            return
        if self._as_json:
            output.as_json(WrittenPurgeLists(lists.directory, lists.n_users, lists.n_entries, lists.is_whole))
            return
        what = f"{output.counted(lists.n_users, 'purge list')} with {output.counted(lists.n_entries, 'path')}"
        lacking = "" if lists.is_whole else "; incomplete: some entries could not be read"
        print(f"{printable(lists.directory)}: {what} {'written' if self._runs else 'would be written'}{lacking}")


def _action(rule: Rule) -> tuple[str, str]:
    """Return the action of a rule, as a verb and as a participle."""
    match rule.action:
        case TrashAction():
            return "trash", "trashed"
        case DeleteAction():
            return "delete", "deleted"
        case MoveAction(target):
            return "move", f"moved to {printable(target)}"
