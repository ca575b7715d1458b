"""Which extended attributes are fetched with the attributes: what is asked for, of the kind that has it, for a time."""

import errno
import stat

import pytest

from fusefs.core.metadata_cache import ACCESS_ACL, CAPABILITY, DEFAULT_ACL, Attributes
from fusefs.mount.tables.prefetch import PrefetchXattrs

DEVICE, OTHER = 8, 9


def seen(kind: int = stat.S_IFREG, device: int = DEVICE) -> Attributes:
    return Attributes(device, 12, kind | 0o644, 1, 0, 0, 0, 0, 0, 4096, 0, 0, 0, 0)


FILE, DIRECTORY = seen(), seen(stat.S_IFDIR)


def test_nothing_is_wanted_that_nobody_asked_for() -> None:
    wanted = PrefetchXattrs(DEVICE)
    assert wanted.bits() == (0, 0)
    assert wanted.names_for(FILE) == ()
    assert not wanted.add(b"user.a", is_directory=False)
    assert wanted.names_for(FILE) == ()


def test_what_was_told_of_a_file_is_wanted_of_files() -> None:
    wanted = PrefetchXattrs(DEVICE)
    assert wanted.add(ACCESS_ACL, is_directory=False)
    assert not wanted.add(ACCESS_ACL, is_directory=False)
    assert wanted.names_for(FILE) == (ACCESS_ACL,)
    assert wanted.names_for(DIRECTORY) == ()
    wanted.add(DEFAULT_ACL, is_directory=True)
    assert wanted.names_for(FILE) == (ACCESS_ACL,)
    assert wanted.names_for(DIRECTORY) == (DEFAULT_ACL,)


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR, stat.S_IFSOCK])
def test_of_what_is_neither_nothing_is_wanted(kind: int) -> None:
    wanted = PrefetchXattrs(DEVICE)
    wanted.add(ACCESS_ACL, is_directory=False)
    assert wanted.names_for(seen(kind)) == ()


def test_it_is_wanted_of_this_listing_and_the_next() -> None:
    wanted = PrefetchXattrs(DEVICE)
    wanted.begin()
    wanted.add(ACCESS_ACL, is_directory=False)
    wanted.begin()
    assert wanted.names_for(FILE) == (ACCESS_ACL,)
    wanted.begin()
    assert wanted.bits() == (0, 0)


def test_what_is_unsupported_is_refused_of_its_kind_alone_until_somebody_has_set_it() -> None:
    wanted = PrefetchXattrs(DEVICE)
    wanted.add(ACCESS_ACL, is_directory=True)
    wanted.note_answers(FILE, [(ACCESS_ACL, errno.EOPNOTSUPP), (CAPABILITY, errno.ENODATA)])
    assert wanted.names_for(FILE) == ()
    assert wanted.names_for(DIRECTORY) == (ACCESS_ACL,)
    assert wanted.is_unsupported(DEVICE, ACCESS_ACL, is_directory=False)
    assert not wanted.is_unsupported(DEVICE, ACCESS_ACL, is_directory=True)
    assert not wanted.is_unsupported(OTHER, ACCESS_ACL, is_directory=False)
    assert not wanted.is_unsupported(DEVICE, CAPABILITY, is_directory=False)
    wanted.note_supported(ACCESS_ACL, is_directory=False)
    assert not wanted.is_unsupported(DEVICE, ACCESS_ACL, is_directory=False)


def test_what_one_file_has_is_refused_of_no_other() -> None:
    """A filesystem may be made of several."""
    wanted = PrefetchXattrs(DEVICE)
    wanted.note_answers(FILE, [(ACCESS_ACL, b"1"), (CAPABILITY, errno.ENODATA)])
    wanted.note_answers(FILE, [(ACCESS_ACL, errno.EOPNOTSUPP), (CAPABILITY, errno.ENOSYS)])
    assert not wanted.is_unsupported(DEVICE, ACCESS_ACL, is_directory=False)
    assert not wanted.is_unsupported(DEVICE, CAPABILITY, is_directory=False)


def test_what_another_filesystem_has_not_this_one_may() -> None:
    wanted = PrefetchXattrs(DEVICE)
    wanted.note_answers(seen(device=OTHER), [(ACCESS_ACL, errno.EOPNOTSUPP)])
    wanted.note_answers(seen(stat.S_IFIFO), [(ACCESS_ACL, errno.EOPNOTSUPP)])
    assert not wanted.is_unsupported(DEVICE, ACCESS_ACL, is_directory=False)


def test_refusals_are_bounded() -> None:
    wanted = PrefetchXattrs(DEVICE)
    for number in range(1000):
        wanted.note_answers(FILE, [(b"user.%d" % number, errno.EOPNOTSUPP)])
    assert wanted.is_unsupported(DEVICE, b"user.999", is_directory=False)
    assert len(wanted._unsupported) <= 64
