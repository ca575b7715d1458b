"""The entry point of the command `trashd`. cli/output.py prints errors."""

from __future__ import annotations

import gc
import io
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType

from fusefs.core.errors import TrashdError, UsageError

_GC_THRESHOLD = 20_000


def main() -> None:
    """Run the command line of this process and exit with its code.

    The process skips the interpreter's cleanup, and collects no garbage while modules are loaded. A swap creates no
    garbage, and each of these two steps would take longer than the swap itself (docs/internals/decisions/0045).
    """
    gc.disable()
    if sys.flags.no_site:
        sys.meta_path.append(_LateSite)
    settle_streams()
    code = run(sys.argv[1:])
    sys.stderr.flush()
    if "mpi4py" in sys.modules:
        sys.exit(code)  # MPICH reports a normal end to mpiexec in a handler of exit(3)
    os._exit(code)


class _LateSite:
    """The module finder of last resort if Python was started without `site`, as by debian/launchers.

    A swap needs no module that only `site` makes available. The first import of such a module loads `site`.
    """

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if path is not None:
            return None
        sys.meta_path.remove(_LateSite)
        import site

        site.main()
        found = (finder.find_spec(name, None, target) for finder in sys.meta_path)
        return next((spec for spec in found if spec is not None), None)


class _Stderr(io.TextIOWrapper):
    """A standard error stream that ignores failed writes, since it may be a file on a full volume."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError:
            return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()


def settle_streams() -> None:
    """Open closed standard streams on /dev/null, and make standard error ignore failed writes.

    Otherwise the next file to be opened would get the number of a closed stream. `sys.__stdin__` and `sys.__stdout__`
    stay None if they were closed.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, number)
            if null != number:
                os.close(null)
            setattr(sys, name, os.fdopen(number, "w" if number else "r"))
    assert isinstance(sys.stderr, io.TextIOWrapper)
    encoding, errors = sys.stderr.encoding, sys.stderr.errors
    sys.stderr = _Stderr(sys.stderr.detach(), encoding, errors, line_buffering=True)


def run(arguments: list[str]) -> int:
    """Run a command line and flush its output. Returns  the exit code"""
    from fusefs.cli import output
    from fusefs.core.errors import Exit

    try:
        code = _run_words(arguments)
        output.flush()
        return code
    except BrokenPipeError:
        return Exit.PIPE
    except (TrashdError, OSError) as error:
        return output.print_error(output.to_error(error), as_json=output.wants_json(arguments))
    except KeyboardInterrupt:
        output.refused(output.flush)
        return Exit.INTERRUPTED


def _run_words(arguments: list[str]) -> int:
    """Run a plain `swap` or `rm` without click, because importing click would take longer; otherwise use click."""
    act = _find_plain_line(arguments)
    # Lists of thousands of objects contain no cycles; collecting after every 700 of them takes a third of the time.
    gc.set_threshold(_GC_THRESHOLD)
    gc.enable()
    if act is not None:
        with suppress(UsageError):  # raised before any work is done; click's command then prints its usage, too
            return act()
    from fusefs.cli.group import dispatch

    return dispatch(arguments)


def _find_plain_line(arguments: list[str]) -> Callable[[], int] | None:
    """Parse a plain command line without click. Returns  the function to call; None if click has to parse the line"""
    match arguments:
        case ["swap", *words]:
            from fusefs.cli.swap_paths import LINE
        case ["rm", *words]:
            from fusefs.cli.rm_paths import LINE
        case _:
            return None
    values = LINE.read(words)
    return None if values is None else partial(LINE.execute, **values)


if __name__ == "__main__":
    main()
