"""The engine answers requests as no kernel sends them: once each, with an errno, and nothing is left of them.

TRASHD_TEST_FUZZ_S     for how long (make fuzz: an hour)
TRASHD_TEST_FUZZ_SEED  the seed of the first case; others follow
"""

import os
import time
from itertools import count
from pathlib import Path

import pytest

from tests.support.fuzz_cases import fuzz

pytestmark = pytest.mark.needs("root")

FUZZ_S = float(os.environ.get("TRASHD_TEST_FUZZ_S", "3"))
SEED = int(os.environ.get("TRASHD_TEST_FUZZ_SEED", "1"))


@pytest.mark.timeout(FUZZ_S + 400)
def test_each_forged_request_has_one_reply_and_nothing_is_left_of_it(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    n_asked = fuzz(scratch, count(SEED), time.monotonic() + FUZZ_S)
    print(f"{n_asked} requests in {FUZZ_S:g} s, seeds from {SEED}")
