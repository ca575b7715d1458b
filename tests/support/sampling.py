"""With --sample (make test) a part of what a test would do one after the other; which part says --randomly-seed."""

import os

SAMPLE_SEED = "TRASHD_TEST_SAMPLE_SEED"
"""Set where --sample is told (tests/conftest.py)."""


def every_other(numbers: list[int]) -> list[int]:
    """These; in a sample every other one, so that another run takes those between."""
    seed = os.environ.get(SAMPLE_SEED)
    return numbers if seed is None else numbers[int(seed) % 2 :: 2]
