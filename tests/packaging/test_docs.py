"""Documents tell the truth: links resolve, commands exist and compose, nothing speaks of one machine."""

import dataclasses
import importlib.util
import os
import re
import shlex
from pathlib import Path

import pytest

from rlpipe.config.run import Config
from tests.helpers.cli import ROOT, run

pytestmark = pytest.mark.packaging
SKIPPED = {"build", "dist", "runs", "outputs", "wandb", "__pycache__"}


def repository():
    """Every file of the project, without what it ignores."""
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [
            name
            for name in folders
            if name not in SKIPPED and not name.endswith(".egg-info") and (name[0] != "." or name == ".ci")
        ]
        yield from (Path(folder, name) for name in files if name != ".git")


DOCUMENTS = sorted(path for path in repository() if path.suffix == ".md")
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


def bash_commands(text):
    for block in re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            yield from (shlex.split(part) for part in re.split(r" && ", line) if part.strip())


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_every_relative_link_resolves(document):
    assert list(broken_links(document)) == []


def test_a_broken_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# One\n[a](page.md#one) [b](page.md#two) [c](gone.md) <img src='x'> [d](https://x.y)\n")
    assert list(broken_links(page)) == ["page.md#two", "gone.md"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_every_command_in_a_document_exists(document, tmp_path):
    for words in bash_commands(document.read_text()):
        words = [word for word in words if not re.fullmatch(r"[A-Z_]+=\S*", word)]
        if words[0] == "bash":
            words = words[1:]
        if words[:3] == ["python", "-m", "rlpipe.run"]:
            given = [word for word in words[3:] if word not in ("--cfg", "job")]
            result = run("--cfg", "job", *given, cwd=tmp_path)
            assert result.returncode == 0, f"{shlex.join(words)}\n{result.stderr}"
        elif words[:2] == ["python", "-m"]:
            assert importlib.util.find_spec(words[2]), shlex.join(words)
        elif words[0] == "python" or "/" in words[0]:
            script = words[1] if words[0] == "python" else words[0]
            if not script.startswith(".venv/"):
                assert (ROOT / script).is_file(), shlex.join(words)
                assert words[0] == "python" or os.access(ROOT / script, os.X_OK), shlex.join(words)
        else:
            assert words[0] in ("git", "cd", "pip", "pre-commit", "docker"), shlex.join(words)


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
