"""Documents tell the truth: links resolve, tables are whole, nothing speaks of one machine."""

import dataclasses
import re

import pytest

from rlpipe.config.run import Config
from tests.helpers.cli import ROOT
from tests.helpers.documents import DOCUMENTS, repository

pytestmark = pytest.mark.packaging
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]


def links(text):
    text = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    return re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'\bsrc="([^"]+)"', text)


def anchors(document):
    """The ids GitHub gives to headings."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(document):
    for link in links(document.read_text()):
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        target = (document.parent / path).resolve() if path else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield link


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_every_relative_link_resolves(document):
    assert list(broken_links(document)) == []


def test_a_broken_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# One\n[a](page.md#one) [b](page.md#two) [c](gone.md) <img src='x'> [d](https://x.y)\n")
    assert list(broken_links(page)) == ["page.md#two", "gone.md"]


def test_every_component_of_the_configuration_is_documented():
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert [field.name for field in dataclasses.fields(Config) if f"`{field.name}`" not in page] == []


@pytest.mark.parametrize("recipe", sorted(p.stem for p in (ROOT / "configs" / "recipe").glob("*.yaml")))
def test_every_recipe_has_a_readme_and_stands_in_the_table(recipe):
    assert (ROOT / "recipes" / recipe / "README.md").is_file()
    assert f"(recipes/{recipe}/README.md)" in (ROOT / "README.md").read_text()


def test_no_file_speaks_of_one_machine_or_of_a_package_registry():
    home, checkout = "/root" + "/", "/work" + "/main"
    hosts = ["pypi" + ".org", "pythonhosted" + ".org", "deb.debian" + ".org", "download.pytorch" + ".org"]
    found = []
    for path in repository():
        text = path.read_text(encoding="utf-8", errors="ignore")
        found += [(str(path.relative_to(ROOT)), word) for word in (home, checkout, *hosts) if word in text]
    assert not found
