"""Daemons that run otherwise than users' do: changing threads all the time, or with a core that looks for faults.

TRASHD_TEST_SANITIZED  a directory with a core that was built with sanitizers (make sanitize): daemons of tests have it
                       in place of their own, and the sanitizers' runtimes; no other process has
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

SWITCH_S: Final = 1e-6
"""After which a thread that wants Python's lock asks for it; the shortest that Python takes. It is 5 ms elsewhere."""

_PREPARE: Final = """
import sys
sys.argv[0] = "trashd"
if interval_s := float(sys.argv.pop(1)):
    sys.setswitchinterval(interval_s)
if core := sys.argv.pop(1):
    import fusefs.mount.native
    fusefs.mount.native.__path__.insert(0, core)
"""
_RUN: Final = """
from fusefs.cli.main import main
sys.exit(main())
"""
_OPTIONS: Final = {
    # Python ends with much of its memory in use.
    "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1:abort_on_error=1",
    "TSAN_OPTIONS": "halt_on_error=0:report_signal_unsafe=0:history_size=4",
    "PYTHONMALLOC": "malloc",  # else objects would be parts of large pieces, in which nothing is seen
}
_RUNTIMES: Final = ("libasan.so", "libubsan.so", "libtsan.so")


def daemon_command(*, switch_s: float = 0) -> list[str | Path]:
    """What runs `trashd` as a mount's daemon. switch_s: Python's switch interval; 0: as it is"""
    return python_command(_RUN, switch_s=switch_s)


def python_command(run: str, *, switch_s: float = 0) -> list[str | Path]:
    """What runs a program in Python as a mount's daemon is run."""
    core = os.environ.get("TRASHD_TEST_SANITIZED", "")
    words = [sys.executable, "-P", "-c", _PREPARE + run, str(switch_s), core]
    return [*(_sanitized(Path(core)) if core else ()), *words]


def _sanitized(core: Path) -> list[str]:
    """What has a program find faults. Raises  AssertionError: the core was built without sanitizers"""
    needed = subprocess.run(["ldd", core / "_core.abi3.so"], capture_output=True, text=True, check=True).stdout.split()
    runtimes = [word for word in needed if word.startswith("/") and Path(word).name.startswith(_RUNTIMES)]
    assert runtimes, f"{core} needs no sanitizer's runtime"
    return ["env", f"LD_PRELOAD={' '.join(runtimes)}", *(f"{name}={value}" for name, value in _OPTIONS.items())]
