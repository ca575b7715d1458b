"""Runs tests again and again beside a load, and counts which of them fail: `make flaky ARGS='tests/service -k held'`.

The load is four loops that do nothing, and a process that writes to half of the memory that is available. Each has a
session of its own, as other people's work has: sessions share the processors fairly (sched(7), autogroup), and beside
loops in its own session the service, which is idle by its priority, would not run at all.
"""

import argparse
import mmap
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Process
from pathlib import Path

ROOT = Path(__file__).parents[1]
_PAGE = 4096


def main() -> int:
    """Run the selection as often as asked; return 1 if a test failed in any run."""
    parser = argparse.ArgumentParser(prog="make flaky", description=__doc__)
    parser.add_argument("--times", type=int, default=10, help="how often the tests run (default: 10)")
    parser.add_argument("--busy", type=int, default=4, help="processes that take a processor each (default: 4)")
    parser.add_argument(
        "--memory", type=float, default=0.5, help="part of the available memory that is written to (0.5)"
    )
    options, selection = parser.parse_known_args()
    failures: Counter[str] = Counter()
    is_good = True
    for number in range(1, options.times + 1):
        begin_s = time.monotonic()
        with _load(options.busy, options.memory):
            run = subprocess.run([ROOT / ".ci/pytest", "-q", *selection], capture_output=True, text=True, check=False)
        lines = run.stdout.splitlines()
        failures.update(line.split()[1] for line in lines if line.startswith(("FAILED ", "ERROR ")))
        is_good &= run.returncode == 0
        print(
            f"run {number}: {lines[-1] if lines else run.stderr} after {time.monotonic() - begin_s:.0f} s", flush=True
        )
        if run.returncode:
            log = ROOT / f"build/flaky-{number}.log"
            log.parent.mkdir(exist_ok=True)
            log.write_text(run.stdout + run.stderr)
            print(f"  output: {log}", flush=True)
    for test, count in failures.most_common():
        print(f"{count} of {options.times}: {test}")
    return 0 if is_good else 1


@contextmanager
def _load(n_busy: int, memory: float) -> Iterator[None]:
    processes = [Process(target=_spin, daemon=True) for _ in range(n_busy)]
    if memory:
        processes.append(Process(target=_write_memory, args=(memory,), daemon=True))
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def _spin() -> None:
    os.setsid()
    while True:
        pass


def _write_memory(part: float) -> None:
    os.setsid()
    (line,) = (line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable:"))
    size_bytes = int(int(line.split()[1]) * 1024 * part) // _PAGE * _PAGE
    with mmap.mmap(-1, size_bytes) as memory:
        while True:
            for offset in range(0, size_bytes, _PAGE):
                memory[offset] ^= 1


if __name__ == "__main__":
    sys.exit(main())
