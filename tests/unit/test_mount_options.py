"""The words of -o: ours, the kernel's, those of others that stand in the same line of fstab, and wrong ones."""

import pytest

from fusefs.core.errors import UsageError
from fusefs.core.mount_options import (
    BackingSpeed,
    Coherence,
    MountOptions,
    PassthroughMode,
    UringMode,
    find_without_effect,
    parse_options,
)
from fusefs.core.uring_choice import FastPath


def parse(
    *texts: str, as_root: bool = True, is_sloppy: bool = False, usual: Coherence = Coherence.SHARED
) -> MountOptions:
    return parse_options(texts, as_root=as_root, is_sloppy=is_sloppy, default_coherence=usual)


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


def test_the_last_word_wins() -> None:
    assert parse("ro,rw").flags == frozenset()
    assert parse("rw,nosuid,noexec", "exec,ro").flags == {"ro", "nosuid"}
    assert parse("coherence=exclusive", "coherence=shared").coherence is Coherence.SHARED


@pytest.mark.parametrize("uring", UringMode)
def test_requests_come_by_io_uring_unless_somebody_says_off(uring: UringMode) -> None:
    assert parse().uring is UringMode.AUTO
    assert parse(f"uring={uring.value}").uring is uring
    assert (FastPath.URING in parse(f"uring={uring.value}").disabled_fast_paths()) == (uring is UringMode.OFF)


def test_no_fast_path_is_off_unless_somebody_says() -> None:
    assert parse().disabled_fast_paths() == {}
    assert parse("uring=off").disabled_fast_paths() == {FastPath.URING: "uring=off"}
    assert parse("passthrough=off").disabled_fast_paths() == {FastPath.PASSTHROUGH: "passthrough=off"}


def test_plain_mode_is_the_engine_switched_off() -> None:
    assert parse("engine=plain").disabled_fast_paths()[FastPath.ENGINE] == "engine=plain"
    assert FastPath.ENGINE not in parse("engine=plain", "engine=auto").disabled_fast_paths()


@pytest.mark.parametrize("on", ["passthrough=on", "uring=on"])
def test_what_takes_the_engine_is_not_there_in_plain_mode(on: str) -> None:
    with pytest.raises(UsageError, match=f"{on} and engine=plain"):
        parse(on, "engine=plain")


@pytest.mark.parametrize("name", ["seam", "direct-requests", "native-core"])
def test_words_of_earlier_versions_name_plain_mode(name: str) -> None:
    assert parse(f"without={name}") == parse()
    assert list(find_without_effect([f"without={name}"])) == [(f"without={name}", "use engine=plain")]


@pytest.mark.parametrize("name", ["kept-listings", "unopened-directories", "kill-privileges"])
def test_words_of_earlier_versions_for_what_is_found_out_are_ignored(name: str) -> None:
    assert parse(f"without={name}") == parse()
    [(word, reason)] = find_without_effect([f"without={name}"])
    assert (word, "where possible" in reason) == (f"without={name}", True)


@pytest.mark.parametrize("name", ["uring", "passthrough"])
def test_what_has_a_word_of_its_own_is_not_switched_off_by_another(name: str) -> None:
    assert parse(f"ro,without={name}") == parse("ro")
    assert list(find_without_effect([f"ro,without={name}"])) == [(f"without={name}", f"use {name}=off")]


@pytest.mark.parametrize(
    "text",
    [
        "defaults", "_netdev,nofail,noauto,users", "x-systemd.automount,x-systemd.idle-timeout=10min",
        "X-mount.mkdir=0755", "comment=a note", "fsname=elsewhere,subtype=other", "relatime,lazytime", "", ",,",
        "noatime,nodiratime", "atime,diratime",
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
        "cache_size", "cache_size=", "cache_size=much", "cache_size=-1", "cache_size=65G", "cache_size=1e3",
        "no_xattr=1", "backing", "backing=fast", "in_flight", "in_flight=0", "in_flight=1025", "in_flight=-1",
        "in_flight=1.5", "uring", "uring=yes", "in_flight=\N{ARABIC-INDIC DIGIT ONE}", "in_flight=99999999999",
    ],
)  # fmt: skip
def test_a_wrong_word_is_told_with_what_to_do(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert text.partition("=")[0].partition(",")[0] in caught.value.message()


def test_a_sloppy_mount_passes_over_unknown_words_only() -> None:
    assert parse("bogus,ro", is_sloppy=True).flags == {"ro"}
    for text in ("timeout=soon", "cache_size=much", "backing=fast", "in_flight=0"):
        with pytest.raises(UsageError):
            parse(text, is_sloppy=True)


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("show_trash", "show_trash", True),
        ("no_xattr", "has_xattrs", False),
        ("cache_size=65536", "cache_bytes", 65536),
        ("cache_size=1.5G", "cache_bytes", 3 << 29),
        ("cache_size=64GiB", "cache_bytes", 64 << 30),
        ("cache_size=1G,cache_size=0", "cache_bytes", 0),
        ("in_flight=1", "n_in_flight", 1),
        ("in_flight=1024", "n_in_flight", 1024),
        ("coherence=exclusive,timeout=0.5", "timeout_s", 0.5),
        ("timeout=0,coherence=exclusive", "timeout_s", 0),
        *((f"backing={one.value}", "backing", one) for one in BackingSpeed if one is not BackingSpeed.AUTO),
        *((f"passthrough={one.value}", "passthrough", one) for one in PassthroughMode if one != PassthroughMode.AUTO),
    ],
)
def test_a_word_means_something_else_than_without_it(text: str, field: str, value: object) -> None:
    assert getattr(parse(), field) != value
    assert getattr(parse(text), field) == value
