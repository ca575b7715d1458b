"""The command `trashd`: the way in, and what an error looks like."""

from __future__ import annotations

import sys

from fusefs.cli import fast, output
from fusefs.core.errors import TrashdError, from_os


def main() -> None:
    """Run the command line of this process and exit with its code."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """The exit code of a command line.

    A plain `trashd swap DIR…` goes straight to work: reading a rich command line costs more than a swap does
    (docs/decisions/0002).
    """
    plain = fast.plain_swap(arguments)
    try:
        if plain is not None:
            return fast.swap_all(plain)
        from fusefs.cli.group import dispatch

        return dispatch(arguments)
    except TrashdError as error:
        return output.failed(error)
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            return output.EXIT_PIPE
        return output.failed(from_os(error, str(error.filename or "")))
    except KeyboardInterrupt:
        return output.EXIT_INTERRUPTED


if __name__ == "__main__":
    main()
