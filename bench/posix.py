"""pjdfstest on `trashd mount`, the filesystem below it and other FUSE daemons, for docs/explain/mount-semantics.md.

    python -m bench.posix

All on the same ext4 in memory, one after the other, at the same path. A subject that is not installed is left out,
and named. As root only; in a mount namespace of its own.
"""

import argparse
from pathlib import Path

from bench.subjects import NATIVE, SUBJECTS, Unable, served
from bench.support import print_progress, volume
from tests.support.mount_namespaces import see_own_mounts_only
from tests.support.real_filesystems import bind_mount
from tests.support.third_party_suites import SuiteResult, pjdfstest, short_path


def examine(name: str, root: Path) -> SuiteResult:
    """What pjdfstest finds of one subject. Raises  Unable"""
    source = root / name
    source.mkdir()
    source.chmod(0o777)
    with served(name, source, None) as (path, _fuse), short_path() as target, bind_mount(path, target):
        return pjdfstest(target)


def main() -> None:
    """Run all and print the table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    see_own_mounts_only()
    rows, skipped_below = [], frozenset[str]()
    with volume("ext4") as root:
        for name in SUBJECTS:
            print_progress(name)
            try:
                outcome = examine(name, root)
            except Unable as error:
                print_progress(f"{name}: {error}")
                continue
            if name == NATIVE:
                skipped_below = outcome.skipped
            more = ", ".join(f"`{test}`" for test in sorted(outcome.skipped - skipped_below)) or "none"
            rows.append(f"| {name} | {outcome.n_passed} | {len(outcome.failed)} | {len(outcome.skipped)} | {more} |")
    print("| | passed | failed | skipped | skipped beyond native |", "|---|---|---|---|---|", *rows, sep="\n")


if __name__ == "__main__":
    main()
