"""Why a machine's mounts do without io_uring: one reason at a time, and the one that has to go first."""

import errno

import pytest

from fusefs.core.uring_choice import SWITCH, UringFacts, find_obstacle, known_faults

ALL_IS_WELL = UringFacts(release="7.2.0", is_enabled=True, refusal=0, disabled=0, barred=frozenset())


def why(facts: UringFacts) -> str:
    found = find_obstacle(facts)
    assert found is not None
    assert "\n" not in found
    return found


def test_nothing_is_against_it_where_all_is_well() -> None:
    assert find_obstacle(ALL_IS_WELL) is None


@pytest.mark.parametrize(
    ("release", "told"),
    [("6.1.0-44-amd64", "it needs Linux 6.14 or later, and this is 6.1.0-44-amd64"), ("7.2.1", "CONFIG_FUSE_IO_URING")],
)
def test_a_kernel_without_it_is_told(release: str, told: str) -> None:
    assert told in why(ALL_IS_WELL._replace(release=release, is_enabled=None))


def test_the_machines_switch_is_told_with_who_sets_it() -> None:
    told = why(ALL_IS_WELL._replace(is_enabled=False))
    assert told.startswith(f"{SWITCH} is N")
    assert "trashd service install --uring" in told
    assert "uring=on" in told


@pytest.mark.parametrize(
    ("refusal", "disabled", "told"),
    [
        (errno.EPERM, 2, "io_uring_disabled is 2"),
        (errno.EPERM, 1, "kernel.io_uring_group"),
        (errno.EPERM, 0, "seccomp"),
        (errno.EACCES, 0, "seccomp"),
        (errno.ENOSYS, 0, "seccomp"),
        (errno.ENOSYS, 1, "seccomp"),
        (errno.ENOMEM, 1, "ulimit -l"),
    ],
)
def test_who_refuses_a_ring_is_told(refusal: int, disabled: int, told: str) -> None:
    assert told in why(ALL_IS_WELL._replace(refusal=refusal, disabled=disabled))


@pytest.mark.parametrize("disabled", [0, 1])
def test_a_limit_that_this_process_passes_is_none(disabled: int) -> None:
    assert find_obstacle(ALL_IS_WELL._replace(disabled=disabled)) is None


@pytest.mark.parametrize(
    ("barred", "told"), [({1}, "off core 1,"), ({2, 1}, "off cores 1, 2,"), (set(range(9)), "off cores 0, 1, 2, …,")]
)
def test_cores_that_the_daemon_may_not_run_on_are_told(barred: set[int], told: str) -> None:
    assert told in why(ALL_IS_WELL._replace(barred=frozenset(barred)))


@pytest.mark.parametrize(
    "release", ["6.18.42", "6.18.44-fc-v657", "6.18.100-1-lts", "7.1.6", "7.2.0-rc1", "7.2", "8.0.1"]
)
def test_kernels_with_the_mends_are_trusted(release: str) -> None:
    assert known_faults(release) is None


@pytest.mark.parametrize(
    "release",
    [
        "6.14.0",
        "6.17.0-20-generic",
        "6.17.99",
        "6.18.41",
        "6.18",
        "6.19.14",
        "7.0.0-12-generic",
        "7.1.5",
        "7.1",
        "linux",
    ],
)
def test_kernels_without_them_are_named_with_those_that_have_them(release: str) -> None:
    faults = known_faults(release)
    assert faults is not None
    assert faults.startswith(f"Linux {release} may have bugs")
    assert "6.18.42, 7.1.6 and 7.2" in faults


def test_a_kernel_that_may_have_faults_is_a_reason_for_mounts_that_do_not_ask_for_it() -> None:
    facts = ALL_IS_WELL._replace(release="6.14.1")
    assert find_obstacle(facts) is None
    assert find_obstacle(facts, trusts_all=False) == known_faults("6.14.1")
    assert find_obstacle(ALL_IS_WELL, trusts_all=False) is None
