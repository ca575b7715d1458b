"""Test suites of others, on a plain directory and through a mount: what comes out otherwise must be expected.

    python -m bench.suites [pjdfstest] [fsx] [LTP]

All of them by default, on ext4 in memory. One that isn't to be had here is left out, and named. What is expected is in
tests/support/third_party_suites.py, each with its reason; anything else makes this end with 1. As root only; in a
mount namespace of its own.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from types import MappingProxyType

from bench.support import print_progress
from tests.support import machine_capabilities, third_party_suites
from tests.support.foreground_mount import trashd_mount
from tests.support.mount_namespaces import see_own_mounts_only
from tests.support.real_filesystems import bind_mount, loop_volume
from tests.support.third_party_suites import EXPECTED, FINE, fsx, pjdfstest, short_path

N_SEEDS, N_OPERATIONS = 12, 2500
SIZE_MB = 256
LIMIT_S = 3600.0

Found = Mapping[str, str]
"""What came of each test: FINE, or how it failed."""


def examine_pjdfstest(path: Path) -> Found:
    """By test."""
    outcome = pjdfstest(path)
    ways = {"fails": outcome.failed, "is skipped": outcome.skipped, FINE: outcome.passed}
    return {test: how for how, tests in ways.items() for test in tests}


def examine_fsx(path: Path) -> Found:
    """By seed."""
    return {f"seed {seed}": fsx(path, seed, N_OPERATIONS, has_blocks=True) or FINE for seed in range(N_SEEDS)}


def examine_ltp(path: Path) -> Found:
    """By test."""
    return {test.name: third_party_suites.ltp_outcome(test, path) for test in third_party_suites.ltp_tests()}


SUITES: Mapping[str, Callable[[Path], Found]] = MappingProxyType(
    {"pjdfstest": examine_pjdfstest, "fsx": examine_fsx, "LTP": examine_ltp}
)


def why_missing(name: str) -> str | None:
    """Why a suite isn't to be had; None: it is."""
    return third_party_suites.why_ltp_is_missing() if name == "LTP" else machine_capabilities.why_missing("cargo")


def both(name: str) -> tuple[Found, Found]:
    """What a suite finds below, and through a mount, at the same path."""
    examine = SUITES[name]
    with loop_volume("ext4", SIZE_MB) as volume, short_path() as target:
        for one in ("native", "source"):
            (volume / one).mkdir()
            (volume / one).chmod(0o777)
        with bind_mount(volume / "native", target):
            below = examine(target)
        with trashd_mount(volume / "source", target, limit_s=LIMIT_S):
            return below, examine(target)


def compare(name: str) -> bool:
    """Print how a suite differs; whether all of that is expected."""
    with redirect_stdout(sys.stderr):  # what they say themselves
        below, mounted = both(name)
    expected = EXPECTED[name]
    unlike = {test: how for test, how in mounted.items() if how != FINE and below.get(test, FINE) == FINE}
    print(f"{name}: {sum(how == FINE for how in below.values())} of {len(below)} pass below")
    for test, how in sorted(unlike.items()):
        print(f"  {test} {how} through the mount: {expected.get(test, 'NOT EXPECTED')}")
    return unlike.keys() <= expected.keys()


def main() -> None:
    """Run those that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SUITES))
    names = parser.parse_args().names or list(SUITES)
    if unknown := set(names) - set(SUITES):
        parser.error(f"no such suite: {', '.join(sorted(unknown))}")
    see_own_mounts_only()
    are_expected = True
    for name in names:
        if why := why_missing(name):
            print(f"{name}: left out: {why}")
            continue
        print_progress(name)
        try:
            are_expected &= compare(name)
        except subprocess.SubprocessError as error:
            print(f"{name}: left out: {error}")
    sys.exit(not are_expected)


if __name__ == "__main__":
    main()
