"""The command line of bench/mount.py and bench/listing.py: parts to measure, or what was measured to be shown."""

import argparse
import os
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from bench.subjects import Row, all_subjects


def parser(
    description: str | None, parts: Collection[str], scenes: Sequence[str], patience_s: float | None = None
) -> argparse.ArgumentParser:
    """Return the parser of the options that both commands have.

    description  the text of --help
    patience_s   of all parts, if not each has its own
    """
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--quick", action="store_true", help="one round of less; see above")
    found.add_argument("--part", action="append", choices=list(parts), help="only this one (may be repeated)")
    found.add_argument("--scene", choices=scenes, help="only there")
    found.add_argument("--subject", action="append", help="only this one (may be repeated)")
    found.add_argument("--rounds", type=int, help="turns of each subject")
    found.add_argument("--patience", type=float, default=patience_s, help="seconds; see above")
    found.add_argument("--example", type=Path, help="pyfuse3's passthroughfs.py")
    found.add_argument("--table", action="store_true", help="measure nothing; print what the newest results say")
    found.add_argument("--plot", type=Path, metavar="FILE", help="measure nothing; draw the newest results as an SVG")
    return found


def parse_arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line; exits if its request is impossible."""
    arguments = parser.parse_args()
    if unknown := set(arguments.subject or ()) - set(all_subjects()):
        parser.error(f"no such subject: {', '.join(sorted(unknown))}")
    if not is_to_show(arguments) and os.geteuid():
        parser.error("only root may mount for all, and drop caches")
    return arguments


def is_to_show(arguments: argparse.Namespace) -> bool:
    """Return whether stored results are requested, and no measurement."""
    return arguments.table or arguments.plot is not None


def show(
    arguments: argparse.Namespace,
    rows: Sequence[Row],
    tables: Callable[[Sequence[Row]], str],
    draw: Callable[[Sequence[Row]], str],
) -> None:
    """Draw or print the stored results; exits if there are none."""
    if not rows:
        sys.exit("nothing measured yet")
    if arguments.plot:
        arguments.plot.write_text(draw(rows), encoding="utf-8")
    if arguments.table:
        print(tables(rows))
