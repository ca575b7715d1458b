"""`trashd` as users run it: a command line in a process of its own, its exit code and its output.

The process is a forked child of the test process, which has every module imported already. It calls
`fusefs.cli.main.main`, as the installed script does, without the start of an interpreter and the imports: these take
50 to 150 ms of processor time in each command.
"""

import ctypes
import errno
import faulthandler
import gc
import json
import logging
import os
import signal
import struct
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import click

from fusefs.cli.main import main
from tests.support.seccomp import deny
from tests.support.transports import transport_words

TRASHD = str(Path(sys.executable).with_name("trashd"))
"""The installed script, for tests whose subject is the start of a process, its streams or its signals."""
EXECUTED = (sys.executable, TRASHD)
"""A command for `service` and `trashd_mount` that executes the script, in memory of its own."""
_REPO = Path(__file__).resolve().parents[2]
_READ_AT_START = ("PYTHON", "LD_", "TRASHD_NATIVE")
"""Beginnings of the variables that Python, the dynamic linker or a module of ours reads once."""
_UTF_8 = ("", "C", "C.UTF-8", "POSIX")
"""Locales with which Python's streams are UTF-8. Source: PEP 538, PEP 540"""
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
_PR_SET_NAME, _PR_SET_MM, _PR_SET_MM_MAP = 15, 35, 14
_LAYOUT = struct.Struct("=12Q2I")
_FIELDS = ((26, 27, 45, 46, 47), (28,), (50, 51))
"""Of /proc/PID/stat, from 1: where code, data and heap are; the stack; the environment."""
_STREAMS = (("stdin", "r", "surrogateescape"), ("stdout", "w", "surrogateescape"), ("stderr", "w", "backslashreplace"))
_FD_MAX = 1 << 20
_libc = ctypes.CDLL(None)
_libc.sbrk.restype = ctypes.c_void_p


class CommandResult(NamedTuple):
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str

    def objects(self) -> list[dict[str, Any]]:
        """The JSON objects of its output, one from each line."""
        return [json.loads(line) for line in self.out.splitlines()]


def trashd(*words: str | bytes | Path, cwd: Path | None = None, stdin: bytes = b"", **variables: str) -> CommandResult:
    """Run `trashd WORDS`, with some environment variables added."""
    has_operand = any(not os.fsdecode(word).startswith("-") for word in words[1:])
    if words[:1] == ("mount",) and has_operand and not {"--explain", "--help"} & set(words):
        words = ("mount", *_each(transport_words(map(os.fsdecode, words))), *words[1:])
    return _run_command(words, environment(variables), cwd=cwd, stdin=stdin)


def trashd_without(
    call: int, *words: str | bytes | Path, refusal: int = errno.EPERM, cwd: Path | None = None
) -> CommandResult:
    """Run `trashd WORDS`, by root, where a system call is refused. refusal: an errno"""
    return _run_command(words, environment({}), cwd=cwd, prepare=partial(deny, call, refusal))


def _run_command(
    words: Sequence[str | bytes | Path],
    env: Mapping[str, str],
    *,
    cwd: Path | None,
    stdin: bytes = b"",
    prepare: Callable[[], object] | None = None,
) -> CommandResult:
    argv = [TRASHD, *words]
    preexec = instead_of_exec(argv, env, prepare)
    done = subprocess.run(argv, cwd=cwd, input=stdin, capture_output=True, env=env, preexec_fn=preexec, check=False)
    return CommandResult(done.returncode, os.fsdecode(done.stdout), os.fsdecode(done.stderr))


def _each(options: list[str]) -> list[str]:
    return [word for option in options for word in ("-o", option)]


def environment(added: Mapping[str, str]) -> dict[str, str]:
    """An environment that has commands print alike on every machine: 80 columns, UTF-8, no colours."""
    return {**os.environ, "COLUMNS": "80", "LC_ALL": "C.UTF-8", "NO_COLOR": "1", **added}


def done_well(*words: str | bytes | Path, cwd: Path | None = None, stdin: bytes = b"") -> CommandResult:
    """Run `trashd WORDS`, which has to succeed."""
    done = trashd(*words, cwd=cwd, stdin=stdin)
    assert done.code == 0, done
    return done


def swapped(victim: Path, *options: str) -> dict[str, Any]:
    """What `trashd swap --json` says of one directory."""
    (swap_result,) = done_well("swap", "--json", *options, victim).objects()
    return swap_result


def instead_of_exec(
    argv: Sequence[str | bytes | Path],
    environment: Mapping[str, str] | None = None,
    prepare: Callable[[], object] | None = None,
    pass_fds: Sequence[int] = (),
) -> Callable[[], object] | None:
    """Return the `preexec_fn` for subprocess with which a child runs the command itself and never executes `argv`.

    Args:
        argv: the script TRASHD and its arguments, or a `support_program`. Another program is executed, after `prepare`.
        environment: the command's; None: that of this process.
        prepare: what the child calls first, for example to become another user.
        pass_fds: the file descriptors above 2 that the command keeps.
    """
    variables = dict(os.environ if environment is None else environment)
    words = [os.fsdecode(word) for word in argv]
    is_support = words[:1] == ["env"] and words[2:4] == [sys.executable, "-m"]
    if not (is_support or words[:1] == [TRASHD]) or not _can_change_to(variables):
        return prepare
    words = words[3:] if is_support else words
    act = import_module(words[1]).main if is_support else main
    # All that can be done before the fork is: each page that the child writes to is copied for it.
    command_line = _CommandLine(words, "python3" if is_support else "trashd")
    removed = os.environ.keys() - variables.keys()
    changed = {name: value for name, value in variables.items() if os.environ.get(name) != value}
    handled = [number for number in signal.valid_signals() if callable(signal.getsignal(number))]
    forget_caches()

    def run_in_child() -> None:
        try:
            command_line.show()
            if prepare is not None:
                prepare()
            for name in removed:
                del os.environ[name]
            os.environ.update(changed)
            for number in handled:
                signal.signal(number, signal.SIG_DFL)
            _start_anew(words, pass_fds)
            sys.argv = words[1:] if is_support else words
            act()
            os._exit(0)
        except SystemExit as end:
            os._exit(end.code if isinstance(end.code, int) else 1)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(120)

    return run_in_child


def support_program(module: str, *words: str | Path) -> list[str | Path]:
    """What runs the `main` of a module of tests/support, and shows it in the command line."""
    return ["env", f"PYTHONPATH={_REPO}", sys.executable, "-m", f"tests.support.{module}", *words]


def _can_change_to(variables: Mapping[str, str]) -> bool:
    """Return whether a process that runs already can behave as one that was started with these variables."""
    is_utf8 = all(value in _UTF_8 for name, value in variables.items() if name.startswith(("LC_", "LANG")))
    read_at_start = [
        {name: value for name, value in those.items() if name.startswith(_READ_AT_START)}
        for those in (variables, os.environ)
    ]
    return is_utf8 and read_at_start[0] == read_at_start[1] and "COVERAGE_PROCESS_START" not in variables


@cache
def _find_caches(_n_modules: int) -> list[Callable[[], object]]:
    """Find what empties each functools.cache of fusefs, and what click keeps in a command: a new process has none.

    Args:
        _n_modules: how many are imported. The search takes 3 ms, and is repeated only when another module came.
    """
    found: list[Callable[[], object]] = []
    for name, module in list(sys.modules.items()):
        for value in vars(module).values() if name.startswith("fusefs.") else ():
            if hasattr(value, "cache_clear"):
                found.append(value.cache_clear)
            if isinstance(value, click.Command):
                found.append(partial(setattr, value, "_help_option", None))
    return found


def forget_caches() -> None:
    """Empty what fusefs has found out about this process, such as its capabilities: they are others now."""
    for clear in _find_caches(len(sys.modules)):
        clear()


class _CommandLine:
    """What readers of /proc/PID/cmdline and comm see of a child. It is in memory as long as this object is.

    Source: PR_SET_MM_MAP in PR_SET_MM(2const); struct prctl_mm_map in linux/prctl.h
    """

    def __init__(self, words: Sequence[str], name: str) -> None:
        text = b"\0".join(map(os.fsencode, [sys.executable, *words])) + b"\0"
        self._buffer = ctypes.create_string_buffer(text, len(text))
        begin = ctypes.addressof(self._buffer)
        code_and_data, stack, variables = _read_layout()
        self._below_heap_end, self._name = code_and_data, name.encode()
        self._above_heap_end = (*stack, begin, begin + len(text), *variables, 0, 0, 0xFFFF_FFFF)

    def show(self) -> None:
        """Show it of this process."""
        layout = _LAYOUT.pack(*self._below_heap_end, _libc.sbrk(0), *self._above_heap_end)
        size = ctypes.c_ulong(len(layout))
        _libc.prctl(_PR_SET_MM, ctypes.c_ulong(_PR_SET_MM_MAP), layout, size, ctypes.c_ulong(0))
        _libc.prctl(_PR_SET_NAME, self._name)


@cache
def _read_layout() -> list[list[int]]:
    """Read where this process and its forked children have what _FIELDS names. Source: proc_pid_stat(5)"""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return [[int(fields[number - 3]) for number in numbers] for numbers in _FIELDS]


def _start_anew(words: list[str], pass_fds: Sequence[int]) -> None:
    """Undo in this process what tests and pytest have set up, so that it is as Python's start leaves one."""
    gc.freeze()  # no collection closes a file of the test process, whose number may be another file's by now
    begin = 3
    for kept in sorted(pass_fds):
        os.closerange(begin, kept)
        begin = kept + 1
    os.closerange(begin, _FD_MAX)
    core = sys.modules.get("fusefs.mount.native._core")
    if core is not None:
        core.close_unused_fds()  # of the forking thread, before their numbers are those of other files
    faulthandler.disable()
    for ignored in _IGNORED_BY_PYTHON:
        signal.signal(ignored, signal.SIG_IGN)
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    time.tzset()
    sys.orig_argv = [sys.executable, *words]
    for number, (name, mode, errors) in enumerate(_STREAMS):
        stream = os.fdopen(number, mode, encoding="utf-8", errors=errors, closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)
