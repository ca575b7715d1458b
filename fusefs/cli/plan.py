"""trashd plan: what rules would do, or that it is done."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout

import click

from fusefs.cli import output
from fusefs.cli.ages import Cutoffs
from fusefs.cli.options import PathBytes, json_option, tempo_options
from fusefs.cli.planning import Telling
from fusefs.cli.stop import Stop
from fusefs.cli.swepttext import counted
from fusefs.core.budget import Tempo
from fusefs.core.errors import BadConfig, Problem, UsageError
from fusefs.core.names import printable
from fusefs.core.plan import Rule
from fusefs.linux.kernel import Kernel
from fusefs.linux.planfiles import load_plan, plan_dir


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
    cutoffs = Cutoffs(Kernel(), notes=runs)
    now_ns = cutoffs.now.wall_ns
    paths = files or _own()
    try:
        # A draft may be looked at whoever wrote it; what is done must be what we, or root, wrote.
        rules = load_plan(paths, now_ns, cutoffs.ago, is_trusting=bool(files) and not runs)
    except BadConfig as error:
        _tell_problems(error.problems, as_json=as_json, is_asked=checks)
        return BadConfig.exit_code
    if not rules and not as_json:
        where = ", ".join(map(printable, paths)) or f"{printable(plan_dir() or b'~')}"
        click.echo(f"there are no rules in {where}", err=True)
    if checks:
        if rules and not as_json:
            print(f"{counted(len(rules), 'rule')}, no problems")
        return 0
    cutoffs.tell()
    return _carry_out(rules, now_ns, Tempo(max_rate, max_bytes), runs=runs, paced=paced, as_json=as_json)


def _own() -> tuple[bytes, ...]:
    """Where this user's rules are, if there are any."""
    own = plan_dir()
    return (own,) if own is not None and os.path.isdir(own) else ()


def _tell_problems(problems: Sequence[Problem], *, as_json: bool, is_asked: bool) -> None:
    """Print each problem: as what was asked for, or as the reason why nothing is done."""
    with redirect_stdout(sys.stdout if is_asked else sys.stderr):
        for problem in problems:
            output.tell_problem(problem, as_json=as_json)
        if not is_asked and not as_json:
            print("trashd: nothing was done")


def _carry_out(rules: Sequence[Rule], now_ns: int, most: Tempo, *, runs: bool, paced: bool, as_json: bool) -> int:
    from fusefs.sweep.planned import How, carry_out
    from fusefs.sweep.request import Wishes

    telling = Telling(runs=runs, as_json=as_json)
    with Stop() as stop:
        how = How(runs, now_ns, Wishes(stops=stop), most, output.tell_why if paced else None)
        for told in carry_out(Kernel(), rules, how):
            telling.tell(told)
        telling.end()
        return stop.exit_code() if stop() else telling.exit_code()
