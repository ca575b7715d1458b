"""Re-create faults that were mended in a copy of the tree, and see which test fails with each of them.

A fault's own test, that of its mend, runs first; the tests of the fault's package only if that one is gone or passes.
A test counts if it fails with the fault and passes without it.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.catch_rate.faults import ROOT, Fault, NotThere, missing_tests, read_faults

SELECTION: tuple[str, ...] = ()
EVERY = ("--every",)
"""The options of pytest for what `make test` and `make every` run."""
TESTS_OF = {
    "browse": ("tests/cli",),
    "cli": ("tests/cli",),
    "core": ("tests/unit",),
    "engine": ("tests/reaper", "tests/sweep"),
    "linux": ("tests/linux", "tests/mount"),
    "mount": ("tests/mount",),
    "plan": ("tests/sweep", "tests/cli"),
    "reaper": ("tests/reaper",),
    "service": ("tests/reaper",),
    "store": ("tests/store", "tests/crash"),
    "sweep": ("tests/sweep", "tests/cli"),
    "waiting": ("tests/reaper", "tests/cli"),
}
_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", re.MULTILINE)
_PASSED, _FAILED_TESTS, _NO_TESTS = 0, 1, 5


class Verdict(NamedTuple):
    """What became of one fault.

    caught_by  a test's node id; None if no test failed
    is_own     it is a test of the mend
    note       why another test, or none, caught it
    """

    fault: Fault
    caught_by: str | None
    is_own: bool
    seconds: float
    note: str = ""

    def describe(self) -> str:
        """The cell of the table."""
        if self.caught_by is None:
            return f"NOT CAUGHT: {self.note}"
        return f"{'own' if self.is_own else 'other'}: {self.caught_by}"


class TreeCopy:
    """A copy of the tracked files with a virtual environment of its own, as `make setup` leaves it."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._n_written = 0

    def fill(self) -> None:
        """Copy, and build what is in C. Raises  CalledProcessError, RuntimeError"""
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
        for name in filter(None, listed.decode().split("\0")):
            if (ROOT / name).is_file():
                (self._root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self._root / name)
        subprocess.run(["cp", "-a", "--reflink=auto", ROOT / ".venv", self._root], check=True)
        for path in self._naming_tree():
            st = path.stat()
            path.write_bytes(path.read_bytes().replace(os.fsencode(ROOT), os.fsencode(self._root)))
            os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns))
        self._build()

    def _naming_tree(self) -> Iterator[Path]:
        """Scripts and settings of the virtual environment that name the tree which was copied."""
        venv = self._root / ".venv"
        for path in [*venv.glob("bin/*"), *venv.glob("*.cfg"), *venv.glob("lib/*/site-packages/*")]:
            if path.is_file() and not path.is_symlink() and os.fsencode(ROOT) in path.read_bytes():
                yield path

    def _build(self) -> None:
        command = [".venv/bin/python", "hatch_build.py"]
        built = subprocess.run(
            command, cwd=self._root, capture_output=True, text=True, check=False,
            env={**_environment(), "TRASHD_NATIVE": "1"},
        )  # fmt: skip
        if built.returncode:
            raise RuntimeError(f"what is in C could not be built:\n{built.stdout}{built.stderr}")

    @contextmanager
    def with_fault(self, fault: Fault) -> Iterator[None]:
        """The copy has the fault meanwhile. Raises  NotThere, RuntimeError"""
        path = self._root / fault.file
        whole, st = path.read_text(encoding="utf-8"), path.stat()
        path.write_text(fault.text(self._root), encoding="utf-8")
        # What Python has compiled is known by a file's size and its time in seconds: each fault has another second.
        self._n_written += 1
        os.utime(path, (st.st_atime, int(st.st_mtime) + self._n_written))
        is_c = path.suffix in (".c", ".h")
        try:
            if is_c:
                self._build()
            yield
        finally:
            path.write_text(whole, encoding="utf-8")
            os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns))
            if is_c:
                self._build()

    def first_failure(self, selected: Sequence[str], chosen: Sequence[str], jobs: int) -> tuple[str | None, str]:
        """The node id of the first test that fails, if one does; and what pytest printed."""
        spread = [f"--numprocesses={jobs}", "--dist=worksteal"] if jobs > 1 else []
        options = ["-q", "--tb=short", "--maxfail=1", *chosen, *spread]
        done = subprocess.run(
            [".ci/pytest", *options, *selected], cwd=self._root, capture_output=True, text=True, errors="replace",
            stdin=subprocess.DEVNULL, check=False, env=_environment(),
        )  # fmt: skip
        printed = done.stdout + done.stderr
        found = _FAILED.search(done.stdout)
        if found is None and done.returncode not in (_PASSED, _NO_TESTS):
            raise RuntimeError(f"pytest could not run {' '.join(selected)}:\n{printed[-4000:]}")
        return (found[1] if found else None), printed


def _environment() -> dict[str, str]:
    """Without what the caller's `make` sets for itself."""
    return {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "ARGS")}


def judge(copy: TreeCopy, fault: Fault, chosen: Sequence[str], jobs: int, *, own_only: bool, verbose: bool) -> Verdict:
    """Which test catches a fault. Raises  NotThere, RuntimeError"""
    began_s = time.monotonic()
    there = [test for test in fault.tests if test not in set(missing_tests(fault, ROOT))]
    suspects = [(there, True)] if there else []
    if not own_only:
        suspects += [(list(TESTS_OF[fault.package()]), False)]
    notes = [] if there else ["its own test is gone"]
    for selected, is_own in suspects:
        with copy.with_fault(fault):
            failed, printed = copy.first_failure(selected, chosen, jobs)
        if verbose:
            print(printed)
        if failed is None:
            notes += [f"{' '.join(selected)} pass"]
            continue
        if copy.first_failure([failed], EVERY, 1)[0] is None:
            return Verdict(fault, failed, is_own, time.monotonic() - began_s, "; ".join(notes))
        notes += [f"{failed} fails without the fault, too"]
    return Verdict(fault, None, False, time.monotonic() - began_s, "; ".join(notes))


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(prog="python -m tests.catch_rate", description=__doc__)
    parser.add_argument("--fault", nargs="+", metavar="NAME", default=[], help="only these")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes of each pytest run; default: 1")
    parser.add_argument("--every", action="store_true", help="every case of each test, as `make every` runs them")
    parser.add_argument("--own", action="store_true", help="only the tests of the mends")
    parser.add_argument("--list", action="store_true", help="print the faults, and run nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each fault")
    parser.add_argument("--verbose", action="store_true", help="print what pytest prints")
    options = parser.parse_args()
    faults = read_faults()
    if unknown := set(options.fault) - {fault.name for fault in faults}:
        parser.error(f"no such fault: {', '.join(sorted(unknown))}; --list prints all")
    faults = [fault for fault in faults if not options.fault or fault.name in options.fault]
    if options.list:
        for fault in faults:
            print(f"{fault.name}  ({fault.mended}, {fault.file})\n    {fault.wrong}")
        return 0
    try:
        for fault in faults:
            fault.text(ROOT)  # refused before anything is copied
        verdicts = list(_judged(faults, EVERY if options.every else SELECTION, options))
    except (NotThere, RuntimeError) as error:
        print(f"catch_rate: {error}", file=sys.stderr)
        return 2
    if not options.json:
        print_table(verdicts)
    return 0 if all(verdict.caught_by for verdict in verdicts) else 1


def _judged(faults: Sequence[Fault], chosen: Sequence[str], options: argparse.Namespace) -> Iterator[Verdict]:
    """Each in turn, told as soon as it is known. Raises  NotThere, RuntimeError"""
    with tempfile.TemporaryDirectory(prefix="trashd-catch-rate-", dir="/var/tmp") as directory:
        os.chmod(directory, 0o755)  # some tests run the tree's commands as other users
        copy = TreeCopy(Path(directory))
        copy.fill()
        for fault in faults:
            verdict = judge(copy, fault, chosen, options.jobs, own_only=options.own, verbose=options.verbose)
            if options.json:
                one = {"fault": fault.name, "caught_by": verdict.caught_by, "is_own": verdict.is_own}
                print(json.dumps({**one, "seconds": round(verdict.seconds, 1), "note": verdict.note}), flush=True)
            else:
                print(f"{fault.name}: {verdict.describe()} ({verdict.seconds:.0f} s)", file=sys.stderr, flush=True)
            yield verdict


def print_table(verdicts: Sequence[Verdict]) -> None:
    """In Markdown."""
    print("| fault | package | mended in | caught by | s |\n|---|---|---|---|---|")
    for one in verdicts:
        fault = one.fault
        print(f"| {fault.name} | {fault.package()} | {fault.mended} | {one.describe()} | {one.seconds:.0f} |")
    print(f"\n{sum(one.caught_by is not None for one in verdicts)} of {len(verdicts)} caught")


if __name__ == "__main__":
    sys.exit(main())
