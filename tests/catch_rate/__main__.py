"""Re-create faults that were mended, one after the other, in a copy of the tree, and name a test that fails with each.

The test of the mend runs first. The tests of the fault's package run only if that test is gone or passes. A test
catches a fault if it fails with the fault and passes without it.
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

from tests.catch_rate.faults import ROOT, Fault, NotThere, find_test, read_faults

SELECTION: tuple[str, ...] = ()
EVERY = ("--every",)
"""The options of pytest for what `make test` and `make every` run."""
ELSEWHERE = {
    "browse": ("tests/cli",),
    "core": ("tests/unit",),
    "linux": ("tests/linux", "tests/mount"),
    "store": ("tests/store", "tests/crash"),
}
"""The tests of packages that have no directory of their name, or others beside it."""
_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", re.MULTILINE)
_PASSED, _NO_TESTS = 0, 5
_OWN_TEST = "tests/unit/test_catch_rate.py"
"""It fails with every fault: the old text is not in the copy."""


class NotRun(Exception):
    """pytest or the compiler could not do their work"""


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
        """Write the cell of the table."""
        if self.caught_by is None:
            return f"NOT CAUGHT: {self.note}"
        return f"{'own' if self.is_own else 'other'}: {self.caught_by.removeprefix('tests/')}".replace("|", "\\|")


class TreeCopy:
    """A copy of the tracked files with a virtual environment of its own, as `make setup` leaves it."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._n_written = 0

    def fill(self) -> None:
        """Copy, and build what is in C. Raises  CalledProcessError, NotRun"""
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
            raise NotRun(f"what is in C could not be built:\n{built.stdout}{built.stderr}")

    @contextmanager
    def with_fault(self, fault: Fault) -> Iterator[None]:
        """The copy has the fault meanwhile. Raises  NotThere, NotRun"""
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
        """Return the node id of the first test that fails, if one does, and what pytest printed. Raises  NotRun"""
        spread = [f"--numprocesses={jobs}", "--dist=worksteal"] if jobs > 1 else []
        options = ["-q", "--tb=short", "--maxfail=1", f"--ignore={_OWN_TEST}", *chosen, *spread]
        done = subprocess.run(
            [".ci/pytest", *options, *selected], cwd=self._root, capture_output=True, text=True, errors="replace",
            stdin=subprocess.DEVNULL, check=False, env=_environment(),
        )  # fmt: skip
        printed = done.stdout + done.stderr
        found = _FAILED.search(done.stdout)
        if found is None and done.returncode not in (_PASSED, _NO_TESTS):
            raise NotRun(f"pytest could not run {' '.join(selected)}:\n{printed[-4000:]}")
        return (found[1] if found else None), printed


def _environment() -> dict[str, str]:
    """Without what the caller's `make` sets for itself."""
    return {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "ARGS")}


def list_package_tests(package: str) -> list[str]:
    """Name the directories of a package's tests."""
    return list(ELSEWHERE.get(package, (f"tests/{package}",)))


def judge(copy: TreeCopy, fault: Fault, options: argparse.Namespace) -> Verdict:
    """Find the test that catches a fault. Raises  NotThere"""
    began_s = time.monotonic()
    chosen = EVERY if options.every else SELECTION
    own = find_test(fault)
    suspects = [(own, True)] if own else []
    if not options.own:
        suspects.append((list_package_tests(fault.package()), False))
    notes = [] if own else ["its own test is gone"]
    caught_by, is_caught_by_own = None, False
    try:
        for selected, is_own in suspects:
            with copy.with_fault(fault):
                failed, printed = copy.first_failure(selected, chosen, options.jobs)
            if options.verbose:
                print(printed)
            if failed is None:
                notes.append(f"{' '.join(selected)} pass")
            elif copy.first_failure([failed], EVERY, 1)[0] is None:
                caught_by, is_caught_by_own = failed, is_own
                break
            else:
                notes.append(f"{failed} fails without the fault, too")
    except NotRun as error:
        print(error, file=sys.stderr)
        notes.append("the tests could not be run")
    return Verdict(fault, caught_by, is_caught_by_own, time.monotonic() - began_s, "; ".join(notes))


def main() -> int:
    """Judge the faults that are asked for; return 1 if one is not caught, 2 if the list does not fit the tree."""
    parser = argparse.ArgumentParser(prog="make catch-rate ARGS=...", description=__doc__)
    parser.add_argument("--fault", nargs="+", metavar="NAME", default=[], help="only these")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes of each pytest run (1)")
    parser.add_argument("--own", action="store_true", help="only the tests of the mends")
    parser.add_argument("--every", action="store_true", help="every case of each test, as `make every` runs them")
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
    except NotThere as error:
        print(f"catch_rate: {error}", file=sys.stderr)
        return 2
    verdicts = list(_judge_all(faults, options))
    if not options.json:
        print_table(verdicts)
    return 0 if all(verdict.caught_by for verdict in verdicts) else 1


def _judge_all(faults: Sequence[Fault], options: argparse.Namespace) -> Iterator[Verdict]:
    """Judge one fault after the other, in one copy of the tree, and print each verdict at once."""
    with tempfile.TemporaryDirectory(prefix="trashd-catch-rate-", dir="/var/tmp") as directory:
        os.chmod(directory, 0o755)  # some tests run the tree's commands as other users
        copy = TreeCopy(Path(directory))
        copy.fill()
        for fault in faults:
            verdict = judge(copy, fault, options)
            if options.json:
                one = {"fault": fault.name, "caught_by": verdict.caught_by, "is_own": verdict.is_own}
                print(json.dumps({**one, "seconds": round(verdict.seconds, 1), "note": verdict.note}), flush=True)
            else:
                print(f"{fault.name}: {verdict.describe()} ({verdict.seconds:.0f} s)", file=sys.stderr, flush=True)
            yield verdict


def print_table(verdicts: Sequence[Verdict]) -> None:
    """Print the verdicts in Markdown."""
    print("| fault | file | mended in | cases | caught by | s |\n|---|---|---|---|---|---|")
    for one in verdicts:
        fault, cases = one.fault, "some" if one.fault.is_some_cases else "all"
        file = fault.file.removeprefix("fusefs/")
        print(f"| {fault.name} | {file} | {fault.mended} | {cases} | {one.describe()} | {one.seconds:.0f} |")
    print(f"\n{sum(one.caught_by is not None for one in verdicts)} of {len(verdicts)} caught")


if __name__ == "__main__":
    sys.exit(main())
