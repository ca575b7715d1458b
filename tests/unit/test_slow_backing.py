"""A backing filesystem counts as slow after several slow replies, and no longer after many quick ones."""

from fusefs.core.slow_backing import SlownessDetector

SLOW_NS, QUICK_NS = 1_000_000, 3_000


def answered(*answers_ns: int, is_slow: bool = False) -> bool:
    latency = SlownessDetector(is_slow=is_slow)
    for answer_ns in answers_ns:
        latency.record(answer_ns)
    return latency.is_slow


def test_a_few_late_answers_of_a_busy_machine_are_no_sign() -> None:
    assert not answered(*[5_000_000] * 7)
    assert not answered(*([QUICK_NS] * 9 + [5_000_000]) * 100)


def test_slow_answers_in_a_row_are_one() -> None:
    assert answered(*[SLOW_NS] * 8)


def test_every_other_answer_being_slow_is_slow() -> None:
    assert answered(*[QUICK_NS, SLOW_NS] * 20)


def test_what_is_slow_stays_so_until_it_was_quick_for_long() -> None:
    assert answered(*[SLOW_NS] * 16, *[QUICK_NS] * 63)
    assert not answered(*[SLOW_NS] * 16, *[QUICK_NS] * 64)


def test_what_is_believed_to_be_slow_has_to_be_quick_for_longer() -> None:
    assert answered(*[QUICK_NS] * 1023, is_slow=True)
    assert not answered(*[QUICK_NS] * 1024, is_slow=True)


def test_answers_between_slow_and_quick_change_nothing() -> None:
    assert answered(*[100_000] * 1000, is_slow=True)
    assert not answered(*[100_000] * 1000, is_slow=False)


def test_late_answers_in_a_row_are_one_sign_and_quick_ones_many() -> None:
    latency = SlownessDetector(is_slow=False)
    for _ in range(8):
        assert not latency.is_slow
        latency.record(SLOW_NS, 8)
    assert latency.is_slow
    latency.record(QUICK_NS, 32)
    assert not latency.is_slow
