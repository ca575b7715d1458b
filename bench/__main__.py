"""All benchmarks, by one command.

    python -m bench --quick                          a sample of each, ten minutes: make bench
    python -m bench --list                           what there is, in which cases
    python -m bench reap --only ext4 --only tree     one, where all these words are of the case, in full size
    python -m bench sweep --files 20000 --rounds 3
    python -m bench --table                          measure nothing; all targets, as the newest runs say
    python -m bench --compare [COMMIT]               the newest runs beside those before them, or of a commit
    python -m bench --plot docs/history.svg          each target over commits

All subjects of a case take turns in one run, and the order rotates; a figure that stands beside a rival's is the median
of the ratios within the rounds, with the interval that the true one lies in (bench/estimates.py). `met?` and `MISSED?`
are said where the interval does not decide it. Each case appends a line to bench/results/runs.jsonl, with every round,
the commit, the machine and its load before and after. As root, in a mount namespace of its own.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bench import history, runs
from bench.declared import BENCHMARKS, targets_of
from bench.programs import PROGRAMS, Program
from bench.reap import rivals_on_path
from bench.runner import MOST_ROUNDS, Benchmark, Case, Result, Until, take
from bench.support import measuring, print_progress
from tests.support.mount_namespaces import see_own_mounts_only

MINUTES = 9.0
"""Of a quick run; what is left of ten is for what is begun."""


class Plan(NamedTuple):
    """What is to be measured next."""

    benchmark: Benchmark
    case: Case
    n_rounds: int


def parse() -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [one.name for one in (*BENCHMARKS, *PROGRAMS)]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"only these: {', '.join(names)}")
    parser.add_argument("--quick", action="store_true", help="less of everything, as many rounds as time allows")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="that a quick run takes")
    parser.add_argument("--only", action="append", default=[], metavar="WORD", help="of a case (may be repeated)")
    parser.add_argument("--files", type=int, help="in the tree, instead of what the case says")
    parser.add_argument("--rounds", type=int, help="turns of each subject")
    parser.add_argument("--list", action="store_true", help="what there is")
    parser.add_argument("--table", action="store_true", help="all targets, as the newest runs say")
    parser.add_argument("--compare", nargs="?", const="", metavar="COMMIT", help="the newest runs with those before")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="each target over commits, as an SVG")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(names):
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}")
    return arguments


def plans(arguments: argparse.Namespace) -> list[Plan]:
    """Return the requested cases of the benchmarks that the runner itself runs; if time is short, one of each first."""
    least = MOST_ROUNDS if arguments.quick else 0
    found = [
        (number, Plan(one, case._replace(n=arguments.files or case.n), arguments.rounds or max(least, one.n_rounds)))
        for one in BENCHMARKS
        if not arguments.names or one.name in arguments.names
        for number, case in enumerate(one.quick if arguments.quick else one.cases)
        if set(arguments.only) <= set(case.words)
    ]
    return [plan for _, plan in sorted(found, key=lambda each: each[0] if arguments.quick else 0)]


def programs(arguments: argparse.Namespace) -> list[Program]:
    """Return the requested benchmarks that have a command of their own; they have no cases to choose from."""
    return [
        one
        for one in PROGRAMS
        if (not arguments.names or one.name in arguments.names)
        and not arguments.only
        and (one.quick or not arguments.quick)
    ]


def measure(arguments: argparse.Namespace) -> Iterator[Result]:
    """Measure everything requested, and store each run as soon as it ends."""
    n_first = len(BENCHMARKS)  # a case of each; then the programs, of which each may have several times as long
    planned = plans(arguments)
    todo: list[Plan | Program] = [*planned[:n_first], *programs(arguments), *planned[n_first:]]
    end_s = time.monotonic() + arguments.minutes * 60
    for number, one in enumerate(todo):
        now_s = time.monotonic()
        if arguments.quick and now_s > end_s:
            print_progress(f"{format_name(one)}: not measured: no time is left")
            continue
        share_s = (end_s - now_s) / sum(map(weight, todo[number:]))
        try:
            if isinstance(one, Program):
                yield from one.measure(
                    is_quick=arguments.quick, limit_s=share_s * weight(one) if arguments.quick else None
                )
            else:
                until = Until(now_s + share_s, end_s) if arguments.quick else None
                run = runs.keep(take(one.benchmark, one.case, one.n_rounds, until))
                yield Result(run, targets_of(run))
        except OSError as error:
            print_progress(f"{format_name(one)}: not measured: {error}")


def weight(one: Plan | Program) -> int:
    """How many shares of the time it has."""
    return 3 if isinstance(one, Program) else 1


def format_name(one: Plan | Program) -> str:
    """Return the name of a benchmark, with its case if it has cases."""
    return one.name if isinstance(one, Program) else f"{one.benchmark.name} {one.case.label}"


def listed() -> Iterator[str]:
    """What there is, for people."""
    for one in BENCHMARKS:
        yield f"{one.name:<13} {one.description}"
        words = dict.fromkeys(word for case in one.cases for word in case.words)
        yield f"{'':<13} {', '.join(words)}: {len(one.cases)} cases, {len(one.quick)} quick"
    for program in PROGRAMS:
        yield f"{program.name:<13} {program.description}"


def show(arguments: argparse.Namespace, results: Sequence[Result]) -> None:
    """Draw, compare or print results, as requested."""
    if arguments.plot:
        arguments.plot.write_text(history.draw(results), encoding="utf-8")
    elif arguments.compare is not None:
        print(history.comparison(results, arguments.compare))
    else:
        print(history.table(history.newest(results)))


def main() -> None:
    """Measure, append the results, print them; or show what was measured."""
    arguments = parse()
    if arguments.list:
        print("\n".join(listed()))
    elif arguments.table or arguments.plot or arguments.compare is not None:
        show(
            arguments,
            [one for one in history.all_results() if not arguments.names or one.run.benchmark in arguments.names],
        )
    elif os.geteuid():
        sys.exit("only root may mount for all, and drop caches")
    else:
        rivals_on_path()
        with measuring():
            see_own_mounts_only()
            print(history.table(list(measure(arguments))))


if __name__ == "__main__":
    main()
