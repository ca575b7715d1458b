"""`trashd swap` as a person waits for it: against its tree's size, the bare interpreter, and rm -rf.

    python -m bench.swap            10 and 1,000,000 files on tmpfs, ext4 and xfs; minutes, gigabytes of memory
    python -m bench.swap --quick    10 and 50,000 files on tmpfs and ext4; what `make bench` runs

All subjects take turns in one run, so that a busy machine is busy for all of them; the figures are medians.
Each run appends a line per filesystem to bench/results/swap.jsonl.
"""

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

from bench.support import PYTHON, TRASHD, compiled, keep, make_tree, only_orphan, time_command, volume

RESULTS = Path(__file__).with_name("results") / "swap.jsonl"
N_SMALL = 10
N_NAMES = 57_000
RECORD_BYTES = 1000

MAX_SIZE_RATIO = 1.2
MAX_INTERPRETERS = 2.0
OPTIONS = ("--json", "--keep-for", "3d", "--note", "a word")
MAX_OPTIONS_RATIO = 1.1
MIN_FASTER_THAN_RM = 200


def measure(filesystem: str, n_files: int, n_rounds: int, n_names: int) -> dict[str, Any]:
    """One filesystem's figures, in seconds and ratios."""
    with volume(filesystem) as root:
        small, big, flushed = root / "small", root / "big", root / "flushed"
        time_command([TRASHD, "init", root])
        make_tree(small, N_SMALL)
        make_tree(big, n_files)
        flushed.mkdir()
        os.sync()
        time_swap(root, small)
        seconds: dict[str, list[float]] = {
            name: [] for name in ("interpreter", "small", "big", "fsyncs", "unflushed", "with_options")
        }
        for number in range(n_rounds):
            seconds["interpreter"].append(time_command([PYTHON, "-c", "pass"]))
            seconds["small"].append(time_swap(root, small))
            seconds["big"].append(time_swap(root, big))
            seconds["fsyncs"].append(time_fsyncs(flushed, number))
            seconds["unflushed"].append(time_swap(root, big, "--no-fsync"))
            seconds["with_options"].append(time_swap(root, big, *OPTIONS))
        found: dict[str, Any] = {name: statistics.median(values) for name, values in seconds.items()}
        found["rm"] = time_command(["rm", "-rf", big])
        if n_names:
            found["names"] = time_names(root, n_names)
    found["size_ratio"] = found["big"] / found["small"]
    found["interpreters"] = (found["big"] - found["fsyncs"]) / found["interpreter"]
    found["options_ratio"] = found["with_options"] / found["big"]
    found["faster_than_rm"] = found["rm"] / found["big"]
    return found


def time_swap(root: Path, victim: Path, *options: str) -> float:
    """Seconds of a swap, which is then taken back."""
    seconds = time_command([TRASHD, "swap", *options, victim])
    time_command([TRASHD, "restore", "--volume", root, only_orphan(root)])
    return seconds


def time_fsyncs(directory: Path, number: int) -> float:
    """Seconds of the fsyncs that a swap makes: of a new record, and of a directory that got a container."""
    container = directory / str(number)
    container.mkdir()
    record = os.open(container / "record.json", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    os.write(record, b"x" * RECORD_BYTES)
    began = time.perf_counter()
    os.fsync(record)
    seconds = time.perf_counter() - began
    os.close(record)
    container.rename(directory / f"adopted-{number}")
    above = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    began = time.perf_counter()
    os.fsync(above)
    seconds += time.perf_counter() - began
    os.close(above)
    return seconds


def time_names(root: Path, n_names: int) -> float:
    """Seconds of `trashd rm -0` for that many names on its standard input."""
    parent = root / "names"
    parent.mkdir()
    listed = root / "listed"
    with listed.open("wb") as file:
        for number in range(n_names):
            name = parent / f"f{number}"
            name.touch()
            file.write(os.fsencode(name) + b"\0")
    return time_command([TRASHD, "rm", "-0", "--no-fsync"], stdin=listed)


def table(rows: list[dict[str, Any]]) -> str:
    """The Markdown table of docs/performance.md."""
    heads = ["filesystem", "files", "swap of 10", "swap of all", "size ratio", "two fsyncs", "python3 -c pass"]
    heads += ["interpreters", "with options", "rm -rf", "times faster"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for row in rows:
        cells = [row["filesystem"], f"{row['n_files']:,}"]
        cells += [f"{row['small'] * 1e3:.1f} ms", f"{row['big'] * 1e3:.1f} ms", f"{row['size_ratio']:.2f}"]
        cells += [f"{row['fsyncs'] * 1e3:.1f} ms", f"{row['interpreter'] * 1e3:.1f} ms", f"{row['interpreters']:.2f}"]
        cells += [f"{row['options_ratio']:.2f}"]
        cells += [f"{row['rm']:.2f} s", f"{row['faster_than_rm']:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def verdicts(row: dict[str, Any]) -> list[str]:
    """Each target, met or missed."""
    targets = [
        ("size ratio", row["size_ratio"], row["size_ratio"] <= MAX_SIZE_RATIO, f"at most {MAX_SIZE_RATIO}"),
        ("interpreters", row["interpreters"], row["interpreters"] <= MAX_INTERPRETERS, f"at most {MAX_INTERPRETERS}"),
        (
            "with options",
            row["options_ratio"],
            row["options_ratio"] <= MAX_OPTIONS_RATIO,
            f"at most {MAX_OPTIONS_RATIO} of without",
        ),
    ]
    if row["n_files"] >= 1_000_000:
        met = row["faster_than_rm"] >= MIN_FASTER_THAN_RM
        targets.append(("times faster than rm -rf", row["faster_than_rm"], met, f"at least {MIN_FASTER_THAN_RM}"))
    told = [
        f"{row['filesystem']}: {name} {value:.2f} ({target}): {'met' if met else 'MISSED'}"
        for name, value, met, target in targets
    ]
    if "names" in row:
        told.append(f"{row['filesystem']}: {N_NAMES:,} names by rm -0 --no-fsync: {row['names']:.1f} s")
    return told


def main() -> None:
    """Measure, append the results, print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="less of everything; 20 seconds")
    parser.add_argument("--filesystem", action="append", help="only this one (may be repeated)")
    parser.add_argument("--files", type=int, help="files of the large tree")
    parser.add_argument("--rounds", type=int, help="swaps of each kind")
    asked = parser.parse_args()
    filesystems = asked.filesystem or (["tmpfs", "ext4"] if asked.quick else ["tmpfs", "ext4", "xfs"])
    n_files = asked.files or (50_000 if asked.quick else 1_000_000)
    n_rounds = asked.rounds or (9 if asked.quick else 25)
    rows = []
    with compiled():
        for filesystem in filesystems:
            try:
                found = measure(filesystem, n_files, n_rounds, 0 if asked.quick else N_NAMES)
            except OSError as error:
                print(f"{filesystem}: not measured: {error}")
                continue
            options = {"quick": asked.quick, "n_rounds": n_rounds}
            rows.append(keep(RESULTS, {"filesystem": filesystem, "n_files": n_files, "options": options, **found}))
            print("\n".join(verdicts(rows[-1])), flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
