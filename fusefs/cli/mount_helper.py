"""mount.fuse.trashd: what mount(8) calls for `mount -t fuse.trashd SRC MNT -o …` and for such a line of fstab."""

from __future__ import annotations

import getopt
import os
import sys

from fusefs.cli import output
from fusefs.cli.main import settle_streams
from fusefs.core.errors import NotPermitted, TrashdError, UsageError, from_os
from fusefs.linux.mountinfo import is_inside, read_mounts
from fusefs.linux.runtime_directories import HOME

_USAGE, _INTERRUPTED, _FAILED = 1, 8, 32  # mount(8), EXIT STATUS
_HINT = "mount.fuse.trashd SRC MNT [-sfnv] [-o OPTIONS]; people use: trashd mount"


def main() -> None:
    """Run the helper of this process and exit with its code."""
    settle_streams()
    code = run(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)


def run(arguments: list[str]) -> int:
    """The exit code of a command line, as mount(8) understands it."""
    try:
        code = _run(arguments)  # of this very function in the daemon, if that could tell one
        return code if code in (0, _USAGE) else _FAILED
    except (UsageError, NotPermitted) as error:
        output.failed(error)
        return _USAGE
    except TrashdError as error:
        output.failed(error)
        return _FAILED
    except OSError as error:
        output.failed(from_os(error, str(error.filename or "a system call")))
        return _FAILED
    except KeyboardInterrupt:
        return _INTERRUPTED


def _run(arguments: list[str]) -> int:
    from fusefs.cli.mount import serve
    from fusefs.mount.places.attach import remount
    from fusefs.mount.places.mount_points import real_path

    try:
        given, paths = getopt.gnu_getopt(arguments, "sfnvN:o:t:")
    except getopt.GetoptError as error:
        raise UsageError(str(error), _HINT) from error
    if len(paths) != 2:
        raise UsageError("SRC and MNT are needed", _HINT)
    letters = {letter for letter, _value in given}
    if "-N" in letters:
        raise UsageError("-N: other namespaces", "run it in there: nsenter --mount=…")
    if "-f" in letters:
        return 0  # a dry run
    source, target = map(os.fsencode, paths)
    words = [value for letter, value in given if letter == "-o"]
    is_sloppy = "-s" in letters
    if remount(real_path(target), words, is_sloppy=is_sloppy):
        return 0
    if _stands(source, target, words, is_sloppy=is_sloppy):
        return 0  # `mount -a` asks for what stands, too: it knows those alone that show a filesystem's own root
    return serve(source, target, words, is_sloppy=is_sloppy)


def _stands(source: bytes, target: bytes, words: list[str], *, is_sloppy: bool) -> bool:
    """Whether this very mount, of this user, is there and works.

    Raises  UsageError: for what can't be asked; Refused: it does not answer
    """
    from fusefs.core.mount_options import Coherence, parse_options
    from fusefs.mount.places.mount_points import Health, health, real_path, silent, top_mount

    uid = os.geteuid()
    options = parse_options(words, as_root=uid == 0, is_sloppy=is_sloppy, usual=Coherence.SHARED)
    source, target = real_path(source), real_path(target)
    mount = top_mount(target, read_mounts())
    if mount is None or not mount.is_ours() or mount.owner != uid or mount.root != b"/":
        return False
    is_it = mount.source == source or (source == target and is_inside(mount.source, HOME))
    is_alike = "ro" not in options.flags or b"ro" in mount.options.split(b",")
    if not (is_it and is_alike):
        return False
    found = health(target)
    if found is Health.SILENT:
        raise silent(target)
    return found is Health.ALIVE


if __name__ == "__main__":
    main()
