"""The words of -o: ours, the kernel's, those of others that stand in the same line of fstab, and wrong ones."""

import pytest

from fusefs.core.errors import UsageError
from fusefs.mount.options import Coherence, Options, parse_options


def parse(*texts: str, as_root: bool = True, is_sloppy: bool = False, usual: Coherence = Coherence.SHARED) -> Options:
    return parse_options(texts, as_root=as_root, is_sloppy=is_sloppy, usual=usual)


def test_root_mounts_for_everybody_and_the_kernel_checks() -> None:
    assert (parse().allow_other, parse().default_permissions) == (True, True)


def test_others_mount_for_themselves_and_the_filesystem_below_checks() -> None:
    options = parse(as_root=False)
    assert (options.allow_other, options.default_permissions) == (False, False)


def test_allow_other_never_goes_without_the_kernels_checks() -> None:
    assert parse("allow_other", as_root=False).default_permissions


@pytest.mark.parametrize("usual", Coherence)
def test_an_exclusive_mount_remembers_longer(usual: Coherence) -> None:
    assert parse(usual=usual).coherence is usual
    assert parse("coherence=exclusive").timeout_s > 100 * parse("coherence=shared").timeout_s


def test_a_timeout_is_taken_whatever_the_coherence() -> None:
    assert parse("coherence=exclusive,timeout=0.5").timeout_s == 0.5
    assert parse("timeout=0", "coherence=exclusive").timeout_s == 0


def test_the_last_word_wins() -> None:
    assert parse("ro,rw").flags == frozenset()
    assert parse("rw,nosuid,noexec", "exec,ro").flags == {"ro", "nosuid"}
    assert parse("coherence=exclusive", "coherence=shared").coherence is Coherence.SHARED


def test_show_trash_is_off_until_somebody_asks() -> None:
    assert not parse().show_trash
    assert parse("show_trash").show_trash


@pytest.mark.parametrize(
    "text",
    [
        "defaults", "_netdev,nofail,noauto,users", "x-systemd.automount,x-systemd.idle-timeout=10min",
        "X-mount.mkdir=0755", "comment=a note", "fsname=elsewhere,subtype=other", "relatime,lazytime", "", ",,",
        'x-systemd.requires-mounts-for="/a,b",nofail', "user=somebody",
    ],
)  # fmt: skip
def test_what_others_read_in_fstab_is_passed_over(text: str) -> None:
    assert parse(text) == parse()


@pytest.mark.parametrize(
    "text",
    [
        "bogus", "show_trash=1", "ro=1", "coherence", "coherence=maybe", "timeout=", "timeout=-1", "timeout=nan",
        "timeout=inf", "timeout=soon", "auto_unmount", "allow_root", "remount", "remount,ro", "show-trash",
    ],
)  # fmt: skip
def test_a_wrong_word_is_told_with_what_to_do(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert caught.value.hint
    assert text.partition("=")[0].partition(",")[0] in caught.value.message()


def test_a_sloppy_mount_passes_over_unknown_words_only() -> None:
    assert parse("bogus,ro", is_sloppy=True).flags == {"ro"}
    with pytest.raises(UsageError):
        parse("timeout=soon", is_sloppy=True)
