"""What is remembered of extended attributes: what is packed comes back; no errors, nothing long, no other names."""

from __future__ import annotations

import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.core.metadata_cache import (
    ACCESS_ACL,
    CAPABILITY,
    DEFAULT_ACL,
    LABEL,
    NAMES,
    Known,
    is_asked_of_all,
    pack,
    unpack,
)

REMEMBERED = [NAMES, ACCESS_ACL, DEFAULT_ACL, CAPABILITY, LABEL]
ABSENT = [errno.ENODATA, errno.EOPNOTSUPP]
LONG = b"x" * 5000


KEYS = st.tuples(st.integers(0, (1 << 32) - 2), st.sampled_from(REMEMBERED))


@given(st.dictionaries(KEYS, st.binary(max_size=4096) | st.sampled_from(ABSENT)))
def test_what_is_packed_comes_back_but_for_capabilities(known: Known) -> None:
    packed = pack(known)
    left = {key: answer for key, answer in known.items() if key[1] != CAPABILITY or isinstance(answer, int)}
    assert unpack(packed) == left
    assert unpack(b"12345678" + packed, 8) == left


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        (ACCESS_ACL, errno.EIO),
        (ACCESS_ACL, errno.ERANGE),
        (ACCESS_ACL, errno.EACCES),
        (ACCESS_ACL, LONG),
        (b"user.a", b"1"),
    ],
)
def test_what_may_be_otherwise_the_next_time_is_left_out(name: bytes, answer: bytes | int) -> None:
    assert pack({(0, name): answer, (0, CAPABILITY): b"1"}) == pack({(0, CAPABILITY): b"1"})


def test_who_knows_of_no_xattrs_has_none() -> None:
    assert unpack(pack({(0, NAMES): errno.ENOSYS})) == {(0, NAMES): errno.EOPNOTSUPP}


def test_that_there_is_none_takes_a_few_bytes() -> None:
    assert len(pack({(0, ACCESS_ACL): errno.ENODATA, (0, CAPABILITY): errno.ENODATA})) <= 18


def test_of_others_nothing_is_remembered() -> None:
    assert all(map(is_asked_of_all, REMEMBERED))
    assert not is_asked_of_all(b"user.a")
    assert not is_asked_of_all(b"ceph.dir.rbytes")
