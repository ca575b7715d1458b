"""Errors as people meet them: each has a sentence, a code and, where there is a next step, a hint."""

import errno
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.core import errors
from fusefs.core.errors import BY_NAME, KernelRefused, NotADirectory, NotFound, NotPermitted, TrashdError, from_os

ALL = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TrashdError)]


@pytest.mark.parametrize("kind", ALL)
def test_class_comes_back_by_its_name(kind: type[TrashdError]) -> None:
    assert BY_NAME[kind.__name__] is kind


@pytest.mark.parametrize("kind", ALL)
def test_message_names_the_object_first(kind: type[TrashdError]) -> None:
    assert kind("what").message() == (f"what: {kind.problem}" if kind.problem else "what")
    assert kind().message() == (kind.problem or (kind.__doc__ or "").splitlines()[0])


@pytest.mark.parametrize("kind", ALL)
def test_phrase_and_hint_of_a_class_are_clauses(kind: type[TrashdError]) -> None:
    assert kind.__doc__
    for text in filter(None, (kind.problem, kind.hint)):
        assert text[0] == "-" or text[0].islower()
        assert not text.endswith(".")


@pytest.mark.parametrize("kind", ALL)
def test_class_has_an_exit_code_and_an_errno(kind: type[TrashdError]) -> None:
    assert 1 <= kind.exit_code < 126
    assert kind.errno in errno.errorcode


def test_hint_of_the_moment_replaces_the_standing_one() -> None:
    assert NotFound("x", "check y").hint == "check y"
    assert NotFound("x").hint == NotFound.hint != ""


def test_missing_path_has_no_hint() -> None:
    error = from_os(OSError(errno.ENOENT, os.strerror(errno.ENOENT)), b"/x")
    assert (error.message(), error.hint) == ("/x: not found", "")


def test_path_in_an_error_moves_no_cursor() -> None:
    assert NotFound(b"\x1b[2J\xff").message().isprintable()


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.EXDEV, errors.CrossesBoundary),
        (errno.ENOLCK, errors.NoLocks),
        (errno.EACCES, NotPermitted),
        (errno.EPERM, NotPermitted),
        (errno.ENOENT, NotFound),
        (errno.ENOTDIR, NotADirectory),
        (errno.ENOSPC, KernelRefused),
        (errno.EDQUOT, KernelRefused),
    ],
)
def test_kernels_word_has_its_class(number: int, kind: type[TrashdError]) -> None:
    assert type(from_os(OSError(number, os.strerror(number)), b"x")) is kind


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE])
def test_what_the_kernel_refused_keeps_its_errno_and_has_a_hint(number: int) -> None:
    converted = from_os(OSError(number, os.strerror(number)), "x")
    assert converted.errno == number
    assert os.strerror(number) in converted.message()
    assert converted.hint


@given(st.integers(0, 200) | st.none(), st.binary(max_size=20) | st.text(max_size=20))
def test_every_errno_has_an_error(number: int | None, what: str | bytes) -> None:
    converted = from_os(OSError() if number is None else OSError(number, "said"), what)
    assert converted.message()
    assert converted.exit_code
