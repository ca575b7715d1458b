"""Encrypted directories (fscrypt): the fresh one has the policy of the old one, or nothing is swapped."""

import errno
import fcntl
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from fusefs.core.errors import NotEncrypted
from fusefs.linux.directory_metadata import make_directory_like, read_metadata
from fusefs.linux.kernel import Kernel
from fusefs.store.check_swap import check_swap
from fusefs.store.stage import SwapOptions
from tests.support.crash_scenarios import forbid_exchange, wipe
from tests.support.other_users import as_user
from tests.support.real_filesystems import Unsupported, loop_volume, overlay_on, tmpfs_volume
from tests.support.store_verbs import ActingBefore, assert_silent, entries, init, raw, remove, restore, swap
from tests.support.trashd_command import done_well

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


pytestmark = pytest.mark.needs("root", "loop")

ALICE = 12001


@pytest.fixture(scope="module")
def encrypting() -> Iterator[Path]:
    try:
        with encrypting_volume() as path:
            yield path
    except Unsupported as error:
        pytest.skip(str(error))


@pytest.fixture
def volume(encrypting: Path) -> Iterator[Path]:
    """With a store, and Alice's home."""
    wipe(encrypting)
    init(encrypting)
    home = encrypting / "home"
    home.mkdir()
    os.chown(home, ALICE, ALICE)
    yield encrypting
    assert_silent(encrypting)


def vault(path: Path, key: bytes) -> bytes:
    """Make an encrypted directory with a file in it; its policy."""
    path.mkdir()
    encrypt(path, key)
    (path / "secret").write_text("x")
    policy = policy_of(path)
    assert policy is not None
    return policy


def tried(path: Path, *, unlike: bool = False) -> tuple[int, tuple[tuple[str, str], ...]]:
    """What `check` and `--dry-run` say: the exit code that a swap would have, and why."""
    found = check_swap(Kernel(), raw(path), accept_differences=unlike)
    return found.exit_code, found.refusals


@pytest.mark.parametrize(
    "options", [SwapOptions(), SwapOptions(accept_differences=True), SwapOptions(keep=("secret",))]
)
def test_the_top_of_an_encrypted_tree_stays_encrypted(volume: Path, options: SwapOptions) -> None:
    job = volume / "job"
    policy = vault(job, add_key(volume))
    assert tried(job) == (0, ())
    swapped = swap(job, options=options)
    assert (policy_of(job), swapped.unlike) == (policy, ())
    restore(volume, swapped.id)
    assert (policy_of(job), (job / "secret").read_text()) == (policy, "x")


def test_two_renames_encrypt_too(volume: Path) -> None:
    forbid_exchange(volume)
    policy = vault(volume / "job", add_key(volume))
    swap(volume / "job")
    assert policy_of(volume / "job") == policy


def test_a_locked_directory_stays_encrypted(volume: Path) -> None:
    key = add_key(volume)
    policy = vault(volume / "job", key)
    remove_key(volume, key)
    assert tried(volume / "job") == (0, ())
    swap(volume / "job")
    assert policy_of(volume / "job") == policy


def test_a_policy_of_the_first_version_is_reproduced(volume: Path) -> None:
    job = volume / "job"
    job.mkdir()
    encrypt_v1(job)
    policy = policy_of(job)
    swap(job)
    assert policy_of(job) == policy
    assert policy is not None


def test_where_flags_can_not_be_read_encryption_is_seen_all_the_same(volume: Path) -> None:
    policy = vault(volume / "job", add_key(volume))

    def refuse() -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    swap(volume / "job", Kernel(ActingBefore("ioctl", refuse)), SwapOptions(accept_differences=True))
    assert policy_of(volume / "job") == policy


def test_a_user_who_added_the_key_swaps(volume: Path) -> None:
    job = volume / "home" / "vault"
    policy = as_user(ALICE, lambda: vault(job, add_key(volume)))
    as_user(ALICE, partial(swap, job))
    assert policy_of(job) == policy


@pytest.mark.parametrize("unlike", [False, True])
def test_a_user_without_the_key_is_refused_also_with_unlike(volume: Path, *, unlike: bool) -> None:
    job = volume / "home" / "vault"
    policy = vault(job, add_key(volume))
    os.chown(job, ALICE, ALICE)
    exit_code, refusals = as_user(ALICE, partial(tried, job, unlike=unlike))
    with pytest.raises(NotEncrypted) as caught:
        as_user(ALICE, partial(swap, job, options=SwapOptions(accept_differences=unlike)))
    assert (exit_code, refusals) == (3, ((caught.value.message(), caught.value.hint),))
    assert "vault (" in caught.value.message()
    assert "--unlike never drops encryption" in caught.value.hint
    assert (policy_of(job), os.listdir(job), entries(volume)) == (policy, ["secret"], [])


@pytest.mark.parametrize("take", [swap, remove])
def test_names_in_an_encrypted_directory_are_in_no_store_outside(volume: Path, take: Callable[[Path], object]) -> None:
    job = volume / "job"
    policy = vault(job, add_key(volume))
    (job / "hidden").mkdir()
    assert tried(job / "hidden") == (0, ())
    take(job / "hidden")
    assert policy_of(job / ".trashd") == policy
    assert [entry.origin for entry in entries(volume)] == [raw(job / "hidden")]
    assert not [path for path in (volume / ".trashd").rglob("*") if "hidden" in path.name]
    assert_silent(job)


def test_a_policy_that_an_overlay_does_not_show_is_named_and_not_dropped(volume: Path) -> None:
    with tmpfs_volume() as lower, overlay_on(lower, volume / "layers") as overlay:
        policy = vault(overlay.upper / "vault", add_key(volume))
        for unlike in (False, True):
            assert tried(overlay.path / "vault", unlike=unlike)[0] == NotEncrypted.exit_code
            with pytest.raises(NotEncrypted, match="policy can't be read"):
                swap(overlay.path / "vault", options=SwapOptions(accept_differences=unlike))
        assert (policy_of(overlay.upper / "vault"), os.listdir(overlay.path / "vault")) == (policy, ["secret"])


def test_a_sweep_and_its_restore_encrypt_the_directories_that_they_make(volume: Path) -> None:
    job = volume / "home" / "job"
    policy = vault(job, add_key(volume))
    done_well("sweep", volume / "home", "--name", "secret")
    [entry] = entries(volume)
    [taken] = [path for path in (volume / ".trashd").rglob("secret") if path.is_file()]
    assert (taken.parent.name, policy_of(taken.parent)) == ("job", policy)
    job.rmdir()
    restore(volume, entry.id)
    assert (policy_of(job), (job / "secret").read_text()) == (policy, "x")


def test_without_the_key_no_plain_directory_is_made_like_an_encrypted_one(volume: Path) -> None:
    """As a restore of a part, a sweep and a move make one."""
    job = volume / "home" / "job"
    vault(job, add_key(volume))
    os.chown(job, ALICE, ALICE)

    def make() -> None:
        kernel = Kernel()
        with kernel.open_dir(kernel.open_path(raw(volume)), b"home") as home, kernel.open_dir(home, b"job") as model:
            make_directory_like(kernel, home, b"made", read_metadata(kernel, model), lambda: None)

    with pytest.raises(OSError, match="not available"):
        as_user(ALICE, make)
    assert os.listdir(volume / "home") == ["job"]
    make()
    assert policy_of(volume / "home" / "made") == policy_of(job)
