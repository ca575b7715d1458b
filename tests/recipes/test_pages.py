"""Every page is in the index, leads somewhere, and says what was run and what was not."""

import re

import pytest

from tests.support.recipe_pages import RECIPES, RecipePage

PAGES = sorted(path.stem for path in RECIPES.glob("*.md") if path.name != "README.md")


def test_the_index_has_every_page() -> None:
    index = (RECIPES / "README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"\]\((\S+)\.md\)", index)) == PAGES


@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_what_fails_what_was_run_and_by_which_test_and_what_was_not(name: str) -> None:
    text = RecipePage(name).text
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert headings[-2:] == ["When something fails", "What was run"]
    run = text.rpartition("## What was run")[2]
    assert f"tests/recipes/test_{name.replace('-', '_')}.py" in run
    assert (RECIPES.parents[2] / f"tests/recipes/test_{name.replace('-', '_')}.py").exists()
    assert "**Not run**" in run


@pytest.mark.parametrize("name", PAGES)
def test_every_command_of_a_page_is_typed_by_its_test(name: str) -> None:
    text = RecipePage(name).text
    test = (RECIPES.parents[2] / f"tests/recipes/test_{name.replace('-', '_')}.py").read_text(encoding="utf-8")
    sections = re.findall(r"^## (.+?)$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    typed = [heading for heading, section in sections if "```console" in section]
    assert [heading for heading in typed if f'.follow("{heading}"' not in test] == []


@pytest.mark.parametrize("name", PAGES)
def test_links_of_a_page_lead_somewhere(name: str) -> None:
    for link in re.findall(r"\]\(([^)#:]+)[^)]*\)", RecipePage(name).text):
        assert (RECIPES / link).resolve().exists(), link
