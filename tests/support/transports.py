"""Over what the mounts of a test get their requests: /dev/fuse, as users' mounts do, io_uring, or pyfuse3 (plain mode).

The modules of ON_BOTH are about the engine: all their cases run over /dev/fuse, and over io_uring one for each value of
each parameter; so do those of ON_PLAIN in plain mode. All others run over /dev/fuse, whatever the machine's switch is.
TRASHD_TEST_TRANSPORT=uring=on has every mount of a run over io_uring (make uring), =engine=plain in plain mode, and
=uring=off over /dev/fuse.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import pytest

VARIABLE: Final = "TRASHD_TEST_TRANSPORT"
RING, DEVICE, PLAIN = "uring=on", "uring=off", "engine=plain"
ON_BOTH: Final = frozenset({
    "test_access_cases", "test_birth_time", "test_callers", "test_current_permissions",
    "test_data_races", "test_fuse_requests_mounted", "test_inode_numbers", "test_inner_mounts",
    "test_kernel_cached_answers", "test_large_listing", "test_setid_bits", "test_validity", "test_listing_race",
    "test_machine", "test_passthrough", "test_passthrough_faults", "test_fair_fds", "test_swap_under_load",
    "test_o_tmpfile_mounted", "test_daemon_killed",
})  # fmt: skip
"""Of tests/mount. Others name both, in their options."""
ON_PLAIN: Final = frozenset({
    "test_access_cases", "test_append", "test_callers", "test_current_permissions",
    "test_data_races", "test_inode_numbers", "test_inner_mounts", "test_large_listing",
    "test_listing_race", "test_machine", "test_setid_bits", "test_swap_under_load",
})  # fmt: skip
_NOT_ON_OTHERS: Final = ("uring=", "--uring", "engine=")
"""What decides it otherwise, among the words of a mount."""


def transport_words(words: Iterable[str]) -> list[str]:
    """The words of -o that go before those of a mount, so that it is where this test wants it."""
    is_decided = any(part in word for word in words for part in _NOT_ON_OTHERS)
    return [] if is_decided else [os.environ.get(VARIABLE, DEVICE)]


def is_plain() -> bool:
    """Whether mounts that say nothing of it are in plain mode now."""
    return os.environ.get(VARIABLE) == PLAIN


def is_by_device() -> bool:
    """Whether mounts that say nothing of it get their requests from /dev/fuse now."""
    return os.environ.get(VARIABLE, DEVICE) == DEVICE


def by_ring(*values: object) -> object:
    """A case of a test that names uring=on."""
    return pytest.param(*values, marks=[pytest.mark.needs("fuse_uring"), pytest.mark.takes_engine])


def values_of(module: str) -> list[object]:
    """What the mounts of a module of tests/mount are run over besides /dev/fuse."""
    return [*([by_ring(RING)] if module in ON_BOTH else []), *([PLAIN] if module in ON_PLAIN else [])]


def cases(options: Mapping[str, Sequence[str]]) -> list[object]:
    """The names of cases, by the options of each."""
    return [by_ring(name) if RING in words else name for name, words in options.items()]
