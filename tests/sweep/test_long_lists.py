"""Lists of any length in bounded memory, through a pipe. TRASHD_TEST_NAMES says how many names (make soak-lists).

Nothing has these names: what is shown is the list's way through the reader, the agenda, the workers and the count.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.peak_usage import beside_small_parent
from tests.support.trashd_command import TRASHD

N_USUAL = 100_000
N_NAMES = int(os.environ.get("TRASHD_TEST_NAMES", N_USUAL))
N_FEW = 10_000
GROWTH_MAX_KIB = 4 * 1024  # less than half of what the names would take; two runs differ by a MiB or two

pytestmark = [pytest.mark.needs("root"), pytest.mark.timeout(600 if N_NAMES <= N_USUAL else 0)]

WRITERS = {
    "in-order": ("nul", 'b"%b/d%06d/f%06d\\0" % (top, n // 1000, n)'),
    "in-no-order": ("nul", 'b"%b/d%03d/f%06d\\0" % (top, n % 1000, n)'),
    "mmapplypolicy": ("mmapplypolicy", 'b"%d 65538 0 show -- %b/d%%20%06d/f%06d\\n" % (n + 1, top, n // 1000, n)'),
}


def peak_kib(top: Path, writer: str, n_names: int, *words: str) -> int:
    """The most memory of a sweep's first process that reads so many names, of which none is there."""
    how, line = WRITERS[writer]
    code = f"import sys; top = sys.argv[1].encode(); sys.stdout.buffer.writelines({line} for n in range({n_names}))"
    command = [TRASHD, "sweep", str(top), "--delete", "--from", "-", "--from-format", how, *words]
    with subprocess.Popen([sys.executable, "-c", code, str(top)], stdout=subprocess.PIPE) as lists:
        swept = beside_small_parent(command)
        done = subprocess.run(swept, stdin=lists.stdout, capture_output=True, text=True, check=False)
    assert f"  {n_names:,} paths of the list are not there" in done.stdout
    return int(done.stderr.splitlines()[-1])


@pytest.mark.parametrize("writer", WRITERS)
def test_a_long_list_takes_no_more_memory_than_a_short_one(volume: Path, writer: str) -> None:
    few, many = (peak_kib(volume, writer, n) for n in (N_FEW, N_NAMES))
    print(f"{writer}: {N_NAMES:,} names: {many:,} KiB; {N_FEW:,}: {few:,} KiB")
    assert many - few < GROWTH_MAX_KIB


def test_a_long_list_that_is_counted_first_is_not_kept_in_memory(volume: Path) -> None:
    few, many = (peak_kib(volume, "in-order", n, "--confirm-above", "1") for n in (N_FEW, N_NAMES))
    assert many - few < GROWTH_MAX_KIB


def test_a_list_that_is_counted_first_is_acted_on_from_its_beginning(volume: Path) -> None:
    names = [f"f{n}" for n in range(100)]
    for name in names:
        (volume / name).touch()
    command = [TRASHD, "sweep", str(volume), "--delete", "--from", "-", "--confirm-above", "1000"]
    done = subprocess.run(command, input="\n".join(names), cwd=volume, capture_output=True, text=True, check=True)
    assert re.search(r"100 matches .*deleted", done.stdout)
    assert not [*volume.glob("f*")]
