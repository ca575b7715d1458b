"""fnmatch(3) of the C library itself, in a locale of one's own choice: the oracle for globs."""

from __future__ import annotations

import ctypes
import functools

_libc = ctypes.CDLL(None, use_errno=True)
_libc.newlocale.restype = _libc.uselocale.restype = ctypes.c_void_p
_libc.newlocale.argtypes = ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p
_libc.uselocale.argtypes = (ctypes.c_void_p,)
_LC_ALL_MASK = 0x1FBF
_FNM_CASEFOLD = 16

PLAIN, UTF_8 = "C", "C.UTF-8"


def fnmatch(pattern: bytes, name: bytes, locale: str, *, ignores_case: bool = False) -> bool:
    """Whether find would say that a name matches, in this thread's locale for as long as it takes."""
    before = _libc.uselocale(_opened(locale))
    try:
        return bool(_libc.fnmatch(pattern, name, _FNM_CASEFOLD * ignores_case) == 0)
    finally:
        _libc.uselocale(before)


@functools.cache
def _opened(locale: str) -> int:
    opened: int | None = _libc.newlocale(_LC_ALL_MASK, locale.encode(), None)
    assert opened, f"no locale {locale}"
    return opened
