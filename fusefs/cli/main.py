"""The command `trashd`: its entry point. cli/output.py prints errors."""

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

    Without the interpreter's own tidying up, and without a search for garbage while modules load: a swap's
    process is too short to have any, and each costs more than the swap itself (docs/decisions/0045).
    """
    gc.disable()
    if sys.flags.no_site:
        sys.meta_path.append(_LateSite)
    settle_streams()
    code = run(sys.argv[1:])
    sys.stderr.flush()
    if "mpi4py" in sys.modules:
        sys.exit(code)  # MPICH tells mpiexec by a handler of exit(3) that this was no crash
    os._exit(code)


class _LateSite:
    """What is asked last for a module, where Python was started without its `site`, as by debian/launchers.

    A swap needs nothing of what `site` finds. With whatever else is imported it is made up for.
    """

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """A module at the top that is nowhere yet."""
        if path is not None:
            return None
        sys.meta_path.remove(_LateSite)
        import site

        site.main()
        found = (finder.find_spec(name, None, target) for finder in sys.meta_path)
        return next((spec for spec in found if spec is not None), None)


class _Stderr(io.TextIOWrapper):
    """Standard error, on which nothing depends: it may be a file on the very volume that is full."""

    def write(self, text: str) -> int:
        """Write it, if that can be."""
        try:
            return super().write(text)
        except OSError:
            return len(text)

    def flush(self) -> None:
        """Have it out, if that can be."""
        with suppress(OSError):
            super().flush()


def settle_streams() -> None:
    """Have standard streams that were closed lead to nothing, and let standard error take what it can.

    The number of a closed one would be that of whatever is opened next. `sys.__stdin__` and `sys.__stdout__` stay None.
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
    """The exit code of a command line; what it prints is out when this returns."""
    from fusefs.cli import output
    from fusefs.core.errors import Exit

    try:
        code = _run(arguments)
        output.flush()
        return code
    except BrokenPipeError:
        return Exit.PIPE
    except (TrashdError, OSError) as error:
        return output.failed(output.to_error(error), as_json=output.wants_json(arguments))
    except KeyboardInterrupt:
        output.refused(output.flush)
        return Exit.INTERRUPTED


def _run(arguments: list[str]) -> int:
    """Run a plain line of `swap` or `rm` without click, whose import takes longer than their work; else use click."""
    act = _find_plain_line(arguments)
    # What is looked at by thousands makes no cycles, and a search each 700 of them takes a third of the time.
    gc.set_threshold(_GC_THRESHOLD)
    gc.enable()
    if act is not None:
        with suppress(UsageError):  # raised before any work is done; click's command prints its usage, too
            return act()
    from fusefs.cli.group import dispatch

    return dispatch(arguments)


def _find_plain_line(arguments: list[str]) -> Callable[[], int] | None:
    """Read a plain line; what carries it out. None: click reads this line."""
    match arguments:
        case ["swap", *words]:
            from fusefs.cli.swap_paths import LINE
        case ["rm", *words]:
            from fusefs.cli.rm_paths import LINE
        case _:
            return None
    values = LINE.read(words)
    return None if values is None else partial(LINE.run, **values)


if __name__ == "__main__":
    main()
