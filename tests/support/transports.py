"""Over what the mounts of a test get their messages: /dev/fuse, as users' mounts do, or io_uring.

The modules of ON_BOTH are about the native core, or about what it shares with Python: all their cases run over
/dev/fuse, and over io_uring one for each value of each parameter. All others run over /dev/fuse.
TRASHD_TEST_URING=on has every mount of a run over io_uring (make uring), =off has none.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import pytest

VARIABLE: Final = "TRASHD_TEST_URING"
ON_BOTH: Final = frozenset({
    "test_access_cases", "test_birth_time", "test_callers", "test_current_owner", "test_current_permissions",
    "test_data_races", "test_fuse_requests_mounted", "test_inode_numbers", "test_incarnations", "test_inner_mounts",
    "test_kernel_cached_answers", "test_setid_bits", "test_validity", "test_listing_race", "test_machine",
    "test_passthrough", "test_passthrough_faults", "test_fair_fds", "test_swap_under_load", "test_o_tmpfile_mounted",
})  # fmt: skip
"""Of tests/mount. Others name both, in their options."""
_NOT_ON_BOTH: Final = ("uring=", "--uring", "without=seam", "without=direct-requests")
"""What decides it otherwise, or what io_uring does not go with, among the words of a mount."""


def ring_words(words: Iterable[str]) -> list[str]:
    """The words of -o that go before those of a mount, so that it is where this test wants it."""
    is_on_ring = os.environ.get(VARIABLE) == "on" and not any(part in word for word in words for part in _NOT_ON_BOTH)
    return ["uring=on"] if is_on_ring else []


def by_ring(*values: object) -> object:
    """A case of a test that names uring=on."""
    return pytest.param(
        *values, marks=[pytest.mark.needs("fuse_uring"), pytest.mark.rests_on("uring", "direct-requests")]
    )


def cases(options: Mapping[str, Sequence[str]]) -> list[object]:
    """The names of cases, by the options of each."""
    return [by_ring(name) if "uring=on" in words else name for name, words in options.items()]
