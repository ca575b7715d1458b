"""Encrypted directories (fscrypt) for a test: keys, policies, and what the kernel says of them.

Source  Documentation/filesystems/fscrypt.rst
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.real_filesystems import Unsupported, loop_volume

_GET_POLICY, _SET_POLICY, _ADD_KEY, _REMOVE_KEY = 0xC0096616, 0x800C6613, 0xC0506617, 0xC0406618
_V1, _V2 = struct.Struct("=BBBB8s"), struct.Struct("=BBBBB3x16s")
_BY_IDENTIFIER = struct.pack("=II", 2, 0)
_AES_XTS, _AES_CTS, _PAD_32 = 1, 4, 3
_KEY_SIZE = 64


@contextmanager
def encrypting_volume() -> Iterator[Path]:
    """An ext4 on which directories can be encrypted. Raises  Unsupported: the kernel has no CONFIG_FS_ENCRYPTION"""
    with loop_volume("ext4", 64, ("-O", "encrypt")) as volume:
        try:
            add_key(volume)
        except OSError as error:
            if error.errno not in (errno.ENOTTY, errno.EOPNOTSUPP):
                raise
            raise Unsupported("this kernel encrypts no directories") from error
        yield volume


def _ioctl(path: Path, request: int, argument: bytes) -> bytes:
    fd, buffer = os.open(path, os.O_RDONLY), bytearray(argument)
    try:
        fcntl.ioctl(fd, request, buffer)
    finally:
        os.close(fd)
    return bytes(buffer)


def add_key(volume: Path) -> bytes:
    """Add a new key as the caller; its identifier."""
    size = struct.pack("=32xII32x", _KEY_SIZE, 0)
    return _ioctl(volume, _ADD_KEY, _BY_IDENTIFIER + size + os.urandom(_KEY_SIZE))[8:24]


def remove_key(volume: Path, key: bytes) -> None:
    """Lock what is encrypted by a key of the caller's."""
    _ioctl(volume, _REMOVE_KEY, _BY_IDENTIFIER + key + bytes(40))


def encrypt(directory: Path, key: bytes) -> None:
    """Encrypt an empty directory of the caller's (policy v2)."""
    _ioctl(directory, _SET_POLICY, _V2.pack(2, _AES_XTS, _AES_CTS, _PAD_32, 0, key))


def encrypt_v1(directory: Path, descriptor: bytes = b"12345678") -> None:
    """Encrypt an empty directory of the caller's (policy v1), with a key that nobody has."""
    _ioctl(directory, _SET_POLICY, _V1.pack(0, _AES_XTS, _AES_CTS, _PAD_32, descriptor))


def policy_of(directory: Path) -> bytes | None:
    """The policy of a directory, as the kernel gives it; None if it is not encrypted."""
    try:
        answer = _ioctl(directory, _GET_POLICY, struct.pack("=Q", _V2.size) + bytes(_V2.size))
    except OSError as error:
        if error.errno != errno.ENODATA:
            raise
        return None
    (size,) = struct.unpack_from("=Q", answer)
    return answer[8 : 8 + size]
