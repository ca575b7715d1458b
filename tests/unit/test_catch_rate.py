"""The list of faults that tests.catch_rate re-creates fits today's tree."""

import pytest
from msgspec import structs

from tests.catch_rate.__main__ import list_package_tests, main
from tests.catch_rate.faults import ROOT, Fault, NotThere, find_test, read_faults

FAULTS = read_faults()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_made_and_its_own_test_is_there(fault: Fault) -> None:
    assert fault.text(ROOT) != (ROOT / fault.file).read_text(encoding="utf-8")
    assert find_test(fault)


def test_no_two_faults_have_one_name_and_each_package_has_its_tests() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert all((ROOT / directory).is_dir() for fault in FAULTS for directory in list_package_tests(fault.package()))


def test_a_fault_whose_text_is_not_there_once_is_refused() -> None:
    with pytest.raises(NotThere, match=r"its old text is 0 times in .*, not once"):
        structs.replace(FAULTS[0], old="no such text").text(ROOT)


def test_the_list_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["tests.catch_rate", "--list"])
    assert main() == 0
    printed = capsys.readouterr().out
    assert [fault.name for fault in FAULTS if f"{fault.name}  (" not in printed] == []
