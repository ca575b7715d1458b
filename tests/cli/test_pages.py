"""Every command in the documents for users is typed, and prints what the page shows."""

import re
from pathlib import Path

import pytest

from tests.support.real_filesystems import loop_volume
from tests.support.typed_pages import is_shown, read_page, type_page

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    *(
        str(path.relative_to(ROOT))
        for part in ("start", "howto", "reference", "explain")
        for path in sorted((ROOT / "docs" / part).glob("*.md"))
    ),
]
TYPED_ELSEWHERE = {"docs/howto/faq.md", "docs/howto/troubleshooting.md"}
"""By test_faq.py and test_troubleshooting_tried.py."""
OF_MOUNTS = "docs/howto/containers-and-mounts.md"
"""Its commands mount."""


@pytest.mark.needs("root", "loop")
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.needs("fuse")) if name == OF_MOUNTS else name
        for name in sorted(set(PAGES) - TYPED_ELSEWHERE)
    ],
)
def test_the_commands_of_a_page_print_what_it_shows(name: str) -> None:
    page = read_page((ROOT / name).read_text(encoding="utf-8"))
    if page.commands:
        with loop_volume("ext4", 200) as volume:
            volume.chmod(0o1777)
            type_page(page, volume)


@pytest.mark.parametrize("name", PAGES)
def test_a_block_that_is_not_run_gives_a_reason(name: str) -> None:
    for reason in read_page((ROOT / name).read_text(encoding="utf-8")).reasons:
        assert reason.startswith("needs ") or (ROOT / reason).exists(), reason


@pytest.mark.parametrize("name", PAGES)
def test_every_block_of_a_shell_is_typed_or_says_why_not(name: str) -> None:
    languages = re.findall(r"^```(\S*)", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)[::2]
    assert set(languages) <= {"console", "sh", "toml", "ini", "json", "yaml", "text"}


def test_other_output_than_shown_is_found() -> None:
    assert is_shown("id  …\n  until…\n", "id 20261130T\n until 3\n")
    assert not is_shown("id …\n", "name 3\n")
