"""trashd plan: what rules would do, or that it is done, told for each directory that had something for them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout

import click

from fusefs.cli import output, sweep_text
from fusefs.cli.json_objects import PlannedRule, RuleLeftUndone, SweepAction, WrittenPurgeLists
from fusefs.cli.options import PathBytes, json_option, tempo_options
from fusefs.cli.stop_signals import StopSignals
from fusefs.cli.wall_clock import AgeCutoffs
from fusefs.core.errors import BadConfig, ConfigProblem, Incomplete, Unsettled, UsageError
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
from fusefs.core.sizes import format_size
from fusefs.core.slice_budget import Speed
from fusefs.core.sweep_result import Swept
from fusefs.linux.kernel import Kernel
from fusefs.linux.plan_files import load_plan, plan_dir


@click.command("plan", short_help="Sweep by rules: say what they would do, or do it.")
@click.argument("files", type=PathBytes(), nargs=-1, metavar="[FILE]…")
@click.option("--run", "runs", is_flag=True, help="Do it. Without it nothing is touched.")
@click.option("--check", "checks", is_flag=True, help="Only say what is wrong in the rules.")
@tempo_options
@json_option
def command(
    files: tuple[bytes, ...],
    runs: bool,
    checks: bool,
    max_rate: int | None,
    max_bytes: int | None,
    paced: bool,
    as_json: bool,
) -> int:
    """Carry out rules such as "what nobody has touched below /scratch for 30 days goes to the trash".

    FILEs are TOML, or directories with *.toml; without any: those in /etc/trashd/plan.d, or of your own in
    ~/.config/trashd/plan.d. It is said what each rule would do, with counts, bytes and the oldest, until you say
    --run. An error in any file is told with its line, and then nothing is done. trashd-sweep.timer does it every night.

    Left alone is what holds a file .trashd-keep, and what any program has locked by flock(2).

    \b
    Examples:
      trashd plan scratch.toml
      trashd plan --check /etc/trashd/plan.d
      trashd plan --run --paced
    """
    if runs and checks:
        raise UsageError("--run with --check", "it is one or the other")
    cutoffs = AgeCutoffs(Kernel(), notes=runs)
    now_ns = cutoffs.now.wall_ns
    paths = files or _own()
    try:
        # A draft by any user may be looked at; what is done must be what we, or root, wrote.
        rules = load_plan(paths, now_ns, cutoffs.ago, is_trusting=bool(files) and not runs)
    except BadConfig as error:
        _tell_problems(error.problems, as_json=as_json, is_asked=checks)
        return BadConfig.exit_code
    if not rules and not as_json:
        where = ", ".join(map(printable, paths)) or f"{printable(plan_dir() or b'~')}"
        click.echo(f"there are no rules in {where}", err=True)
    if checks:
        if rules and not as_json:
            print(f"{output.counted(len(rules), 'rule')}, no problems")
        return 0
    cutoffs.tell()
    return _carry_out(rules, now_ns, Speed(max_rate, max_bytes), runs=runs, paced=paced, as_json=as_json)


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


def _carry_out(rules: Sequence[Rule], now_ns: int, most: Speed, *, runs: bool, paced: bool, as_json: bool) -> int:
    from fusefs.plan.run_plan import PlanOptions, carry_out
    from fusefs.sweep.request import SweepWishes

    telling = _PlanReport(runs=runs, as_json=as_json)
    with StopSignals() as stop:
        how = PlanOptions(runs, now_ns, SweepWishes(stops=stop), most, output.tell_why if paced else None)
        for told in carry_out(Kernel(), rules, how):
            telling.tell(told)
        telling.end()
        return stop.exit_code() if stop() else telling.exit_code()


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
        print(f"{what} taken" if self._runs else f"{what} would be taken; nothing was touched (--run does it)")

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
            sweep_text.as_json(SweepAction(action, not self._runs), swept, PlannedRule(str(rule.place)))
        elif sums.n_matched or sums.n_spared or sums.n_mounts or is_short:
            first, *others = sweep_text.told(swept, did if self._runs else f"would be {did}")
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
