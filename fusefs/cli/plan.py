"""trashd plan: what rules would do, or that it is done, told for each directory that had something for them."""

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
    PurgeListed,
    Rule,
    RuleDone,
    RuleNotDone,
    RuleOutcome,
    TrashAction,
)
from fusefs.core.printable_names import printable
from fusefs.core.results import Swept
from fusefs.linux.children import ask_each
from fusefs.linux.config_files import is_drop_in, load_plan, plan_dir
from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import covering, read_mounts

_NO_DIRECTORY = b"no directory"


class _PlanGroup(OrderedGroup):
    """Its commands; without one `show` is meant."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Have a command stand first. Raises  UsageError"""
        first = args[0] if args else ""
        is_completed = ctx.resilient_parsing and not args  # a shell is offered the commands
        if is_completed or first in self.commands or first in ctx.help_option_names:
            return super().parse_args(ctx, args)
        if first and not first.startswith("-") and not os.path.lexists(first) and (meant := self.meant(ctx, first)):
            ctx.fail(f"There is no file {first!r}, nor such a command. Did you mean {meant}?")
        return super().parse_args(ctx, ["show", *args])


_plans_argument = click.argument("files", type=PathBytes(), nargs=-1, metavar="[PLAN]…")


@click.group("plan", cls=_PlanGroup, short_help="Sweep by rules: say what they would do, or do it.")
def command() -> None:
    """Carry out rules such as "what nobody has touched below /scratch for 30 days goes to the trash".

    A PLAN is a TOML file, or a directory with *.toml; without any: those in /etc/trashd/plan.d, or of your own in
    ~/.config/trashd/plan.d. An error in any of them is told with its key, and then nothing is done.
    trashd-sweep.timer applies the system's every night.

    Left alone is what holds a file .trashd-keep, and what any program has locked by flock(2).

    \b
    Examples:
      trashd plan show scratch.toml
      trashd plan apply --paced
    """


@command.command("show", short_help="Say what it would do now; nothing is touched.")
@_plans_argument
@tempo_options
@json_option
def show_command(**options: Any) -> int:
    """Say what each rule would do now, with counts, bytes, the largest and the oldest; nothing is touched.

    \b
    Examples:
      trashd plan show
      trashd plan show draft.toml
    """
    return _plan(**options, runs=False)


@command.command("apply", short_help="Do it.")
@_plans_argument
@tempo_options
@json_option
def apply_command(**options: Any) -> int:
    """Do what the rules say, and tell it. The files must be root's, or your own, and nobody else's to write.

    \b
    Examples:
      trashd plan apply --paced
      trashd plan apply --max-rate 5000/s scratch.toml
    """
    return _plan(**options, runs=True)


@command.command("check", short_help="Only say what is wrong in the rules.")
@_plans_argument
@json_option
def check_command(files: tuple[bytes, ...], as_json: bool) -> int:
    """Only say what is wrong in the rules; `trashd doctor` checks yours, too.

    \b
    Examples:
      trashd plan check draft.toml
    """
    warnings: list[ConfigProblem] = []
    cutoffs, paths = AgeCutoffs(Kernel(), notes=False), files or _own()
    try:
        rules = load_plan(paths, cutoffs.now.wall_ns, cutoffs.ago, warnings.append, is_trusting=bool(files))
    except BadConfig as error:
        _tell_problems(error.problems, as_json=as_json, is_asked=True)
        return BadConfig.exit_code
    _tell_problems(warnings, as_json=as_json, is_asked=True)
    if not as_json and not warnings:
        print(f"{output.counted(len(rules), 'rule')}, no problems") if rules else _tell_none(paths)
    return 0


def problems_in_plans() -> tuple[ConfigProblem, ...]:
    """What is wrong in the caller's rules, which are the system's for root."""
    warnings: list[ConfigProblem] = []
    try:
        cutoffs = AgeCutoffs(Kernel(), notes=False)
        rules = load_plan(_own(), cutoffs.now.wall_ns, cutoffs.ago, warnings.append, is_trusting=False)
    except BadConfig as error:
        return error.problems
    return (*warnings, *refused_rules(rules, cutoffs.now.wall_ns))


def has_plans() -> bool:
    """Whether the caller has rules at all, right or wrong."""
    with suppress(OSError):  # what is wrong with it is told as a problem
        return any(is_drop_in(name) for own in _own() for name in os.listdir(own))
    return False


def refused_rules(rules: Sequence[Rule], now_ns: int) -> Iterator[ConfigProblem]:
    """Rules for one directory that isn't there, or keeps no access times. One with wildcards waits for what comes."""
    from fusefs.sweep.open_directories import has_wildcards

    mounts = read_mounts()
    named = [rule for rule in rules if not has_wildcards(rule.directory)]
    # A child looks: what does not answer there is told by the look at the stores.
    looks = ask_each(
        named, lambda rule: _why_refused(rule, now_ns), set(), lambda rule: covering(rule.directory, mounts)
    )
    for rule, answer in looks:
        if answer == _NO_DIRECTORY:
            fix = "name one that is, or take the rule away"
            yield rule.place.problem(f"{printable(rule.directory)} is no directory", fix)
        elif answer:
            fix = "go by another time, or mount it with relatime; or write trusts_atime = true"
            yield rule.place.problem(answer.decode(), fix)


def _why_refused(rule: Rule, now_ns: int) -> bytes:
    """A sentence; nothing if the rule is carried out."""
    from fusefs.store.victim import find_scope
    from fusefs.sweep.request import refuse_stale

    if not os.path.isdir(rule.directory):
        return _NO_DIRECTORY
    try:
        if not rule.trusts_atime:
            with find_scope(Kernel(), rule.directory) as scope:
                refuse_stale(scope, rule.times(), now_ns, takes_dirs=rule.takes_dirs(), key="trusts_atime")
    except Refused as error:
        return error.detail.encode()
    except (OSError, TrashdError):
        pass  # trashd plan show says it
    return b""


def _plan(
    files: tuple[bytes, ...], max_rate: int | None, max_bytes: int | None, paced: bool, as_json: bool, runs: bool
) -> int:
    cutoffs, paths = AgeCutoffs(Kernel(), notes=runs), files or _own()
    try:
        # A draft by any user may be looked at; what is done must be what we, or root, wrote.
        is_trusting = bool(files) and not runs
        rules = load_plan(
            paths, cutoffs.now.wall_ns, cutoffs.ago, lambda one: output.warn(str(one)), is_trusting=is_trusting
        )
    except BadConfig as error:
        _tell_problems(error.problems, as_json=as_json, is_asked=False)
        return BadConfig.exit_code
    if not rules and not as_json:
        _tell_none(paths)
    cutoffs.tell()
    from fusefs.plan.run_plan import PlanOptions, carry_out
    from fusefs.sweep.request import SweepWishes

    telling, most = _PlanReport(runs=runs, as_json=as_json), Speed(max_rate, max_bytes)
    with StopSignals() as stop:
        why = output.tell_why if paced else None
        how = PlanOptions(runs, cutoffs.now.wall_ns, SweepWishes(stops=stop), most, why)
        for told in carry_out(Kernel(), rules, how):
            telling.tell(told)
        telling.end()
        return stop.exit_code() if stop() else telling.exit_code()


def _tell_none(paths: Sequence[bytes]) -> None:
    where = ", ".join(map(printable, paths)) or f"{printable(plan_dir() or b'~')}"
    click.echo(f"there are no rules in {where}", err=True)


def _own() -> tuple[bytes, ...]:
    """Where this user's rules are, if there are any."""
    own = plan_dir()
    return (own,) if own is not None and os.path.isdir(own) else ()


def _tell_problems(problems: Sequence[ConfigProblem], *, as_json: bool, is_asked: bool) -> None:
    """Print each problem: as what was asked for, or as the reason why nothing is done."""
    with redirect_stdout(sys.stdout if is_asked else sys.stderr):
        for problem in problems:
            output.tell_problem(problem, as_json=as_json)
        if not is_asked and not as_json:
            print("trashd: nothing was done")


class _PlanReport:
    """Told one after the other; the sum, and the exit code that comes of it."""

    def __init__(self, *, runs: bool, as_json: bool) -> None:
        self._runs = runs
        self._as_json = as_json
        self._codes: list[int] = []
        self._n_directories = 0
        self._n_matches = 0
        self._n_bytes = 0

    def tell(self, told: RuleOutcome) -> None:
        """Print one."""
        match told:
            case RuleDone(rule, swept):
                self._done(rule, swept)
            case RuleNotDone():
                self._not_done(told)
            case PurgeListed():
                self._listed(told)

    def end(self) -> None:
        """Print the sum."""
        if self._as_json:
            return
        size = f" ({format_size(self._n_bytes)})" if self._n_bytes else ""
        where = output.counted(self._n_directories, "directory", "directories")
        what = f"{output.counted(self._n_matches, 'match', 'matches')}{size} in {where}"
        print(
            f"{what} taken" if self._runs else f"{what} would be taken; nothing was touched (trashd plan apply does it)"
        )

    def exit_code(self) -> int:
        """A single error's own, or Incomplete's."""
        return output.exit_code([code for code in self._codes if code] or [0])

    def _done(self, rule: Rule, swept: Swept) -> None:
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
            first, *others = sweep.told(swept, did if self._runs else f"would be {did}")
            print("\n".join([f"{rule.place}: {first}", *others]))
        for warning in swept.warnings:
            output.warn(warning)

    def _not_done(self, told: RuleNotDone) -> None:
        error = told.error
        self._codes.append(0 if error is None else error.exit_code)
        if self._as_json:
            name = None if error is None else type(error).__name__
            output.as_json(RuleLeftUndone(str(told.rule.place), told.directory, told.why, name))
            return
        print(f"{told.rule.place}: {printable(told.directory)}: {told.why}")
        if error is not None and error.hint:
            print(f"  hint: {error.hint}")

    def _listed(self, told: PurgeListed) -> None:
        if told.error is not None:
            self._codes.append(output.failed(told.error, as_json=self._as_json))
            return
        if self._as_json:
            output.as_json(WrittenPurgeLists(told.directory, told.n_users, told.n_entries, told.is_whole))
            return
        what = f"{output.counted(told.n_users, 'list')} of {output.counted(told.n_entries, 'path')}"
        lacking = "" if told.is_whole else "; not complete: not all could be looked at"
        print(f"{printable(told.directory)}: {what}{'' if self._runs else ' would be written'}{lacking}")


def _action(rule: Rule) -> tuple[str, str]:
    """What a rule does, in a word, and what becomes of its matches, as a participle."""
    match rule.act:
        case TrashAction():
            return "trash", "trashed"
        case DeleteAction():
            return "delete", "deleted"
        case MoveAction(target):
            return "move", f"moved to {printable(target)}"
