"""What is remembered of extended attributes: what is packed comes back; no errors, nothing long, no other names."""

from __future__ import annotations

import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.core.xattrs import (
    ACCESS_ACL,
    CAPABILITY,
    DEFAULT_ACL,
    LABEL,
    NAMES,
    is_asked_of_all,
    pack,
    unpack,
)

REMEMBERED = [NAMES, ACCESS_ACL, DEFAULT_ACL, CAPABILITY, LABEL]
ABSENT = [errno.ENODATA, errno.EOPNOTSUPP, errno.ENOSYS]
LONG = b"x" * 5000


@given(st.dictionaries(st.sampled_from(REMEMBERED), st.binary(max_size=4096) | st.sampled_from(ABSENT)))
def test_what_is_packed_comes_back(answers: dict[bytes, bytes | int]) -> None:
    packed = pack(answers)
    assert dict(unpack(packed)) == answers
    assert dict(unpack(b"12345678" + packed, 8)) == answers


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
    assert pack({name: answer, CAPABILITY: b"1"}) == pack({CAPABILITY: b"1"})


def test_that_there_is_none_takes_a_few_bytes() -> None:
    assert len(pack(dict.fromkeys((ACCESS_ACL, CAPABILITY), errno.ENODATA))) <= 10


def test_of_others_nothing_is_remembered() -> None:
    assert all(map(is_asked_of_all, REMEMBERED))
    assert not is_asked_of_all(b"user.a")
    assert not is_asked_of_all(b"ceph.dir.rbytes")
