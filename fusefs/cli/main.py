"""The command `trashd`: the way in, and what an error looks like."""

from __future__ import annotations

import errno
import gc
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from fusefs.core.errors import TrashdError

_GC_THRESHOLD = 20_000


def main() -> None:
    """Run the command line of this process and exit with its code.

    Without the interpreter's own tidying up, and without a search for garbage while modules load: a swap's
    process is too short to have any, and each costs more than the swap itself (docs/decisions/0002).
    """
    gc.disable()
    code = run(sys.argv[1:])
    if sys.stderr is not None:
        sys.stderr.flush()
    os._exit(code)


def run(arguments: list[str]) -> int:
    """The exit code of a command line; what it prints is out when this returns."""
    from fusefs.cli import output
    from fusefs.core.errors import TrashdError

    try:
        code = _run(arguments)
        print(end="", flush=True)
        return code
    except TrashdError as error:
        return output.failed(error, as_json="--json" in arguments)
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            return output.EXIT_PIPE
        return output.failed(_told(error), as_json="--json" in arguments)
    except KeyboardInterrupt:
        return output.EXIT_INTERRUPTED


def _told(error: OSError) -> TrashdError:
    """What a person is told of an error that nobody said more about."""
    from fusefs.core.errors import KernelRefused, NotFound, from_os

    number = error.errno or errno.EIO
    if error.filename is not None:
        return from_os(error, str(error.filename))
    if _refuses(lambda: print(end="", flush=True)) == number:  # what it has not taken is tried again
        hint = "what was done is done, and was not told to the end"
        return KernelRefused(f"standard output: {os.strerror(number)}", hint, number)
    if _refuses(os.getcwdb) == number:
        return NotFound("the working directory was removed", "go to another one: cd /")
    return from_os(error, "a system call")


def _refuses(act: Callable[[], object]) -> int | None:
    """The errno with which something is refused; None if it isn't."""
    try:
        act()
    except OSError as error:
        return error.errno
    return None


def _run(arguments: list[str]) -> int:
    """A plain `trashd swap DIR…` goes straight to work: reading a rich command line costs more than a swap does."""
    from fusefs.cli import fast

    plain = fast.plain_swap(arguments)
    if plain is not None:
        return fast.swap_all(plain)
    from fusefs.cli.group import dispatch

    # What is looked at by thousands makes no cycles, and a search each 700 of them takes a third of the time.
    gc.set_threshold(_GC_THRESHOLD)
    gc.enable()
    return dispatch(arguments)


if __name__ == "__main__":
    main()
