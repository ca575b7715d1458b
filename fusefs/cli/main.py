"""The command `trashd`: the way in, and what an error looks like."""

from __future__ import annotations

import gc
import os
import sys


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
    from fusefs.core.errors import TrashdError, from_os

    try:
        code = _run(arguments)
        print(end="", flush=True)
        return code
    except TrashdError as error:
        return output.failed(error, as_json="--json" in arguments)
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            return output.EXIT_PIPE
        return output.failed(from_os(error, str(error.filename or "a system call")), as_json="--json" in arguments)
    except KeyboardInterrupt:
        return output.EXIT_INTERRUPTED


def _run(arguments: list[str]) -> int:
    """A plain `trashd swap DIR…` goes straight to work: reading a rich command line costs more than a swap does."""
    from fusefs.cli import fast

    plain = fast.plain_swap(arguments)
    if plain is not None:
        return fast.swap_all(plain)
    from fusefs.cli.group import dispatch

    gc.enable()
    return dispatch(arguments)


if __name__ == "__main__":
    main()
