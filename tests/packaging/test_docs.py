"""Documents tell the truth: links resolve, tables are whole, nothing speaks of one machine."""

import dataclasses
import re

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import rlpipe.cli.run  # noqa: F401  (registers the schema)
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


def long_pages(folder):
    """Pages of a folder with more than 1,800 words, other than reference and developer notes."""
    pages = [*(folder / "docs").glob("*.md"), *folder.glob("recipes/*/README.md")]
    long = [page.name for page in pages if len(page.read_text().split()) > 1800]
    return [name for name in long if name != "metrics.md"]


def test_no_page_but_reference_is_long(tmp_path):
    assert long_pages(ROOT) == []
    seen = re.sub("<!--.*?-->", "", (ROOT / "README.md").read_text())
    assert len(seen.split()) <= 1623  # as many as at commit 0740eb8
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text("word " * 1801)
    assert long_pages(tmp_path) == ["page.md"]


def test_every_component_of_the_configuration_is_documented():
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert [field.name for field in dataclasses.fields(Config) if f"`{field.name}`" not in page] == []


@pytest.mark.parametrize("recipe", sorted(p.stem for p in (ROOT / "configs" / "recipe").glob("*.yaml")))
def test_every_recipe_has_a_readme_and_stands_in_the_table(recipe):
    assert (ROOT / "recipes" / recipe / "README.md").is_file()
    assert f"(recipes/{recipe}/README.md)" in (ROOT / "README.md").read_text()


def test_the_readmes_ten_settings_have_the_defaults_of_the_main_job():
    _, section = (ROOT / "README.md").read_text().split("## Ten settings\n")
    rows = re.findall(r"^\| `([a-z_.]+)` \| `?([^ `|]+)", section.split("\n## ")[0], flags=re.MULTILINE)
    shown = {key: yaml.safe_load(value) for key, value in rows}
    with initialize_config_dir(config_dir=str(ROOT / "configs"), version_base="1.3"):
        config = compose(config_name="config", overrides=["+recipe=swe_rl"])
    assert len(shown) == 10
    for key, value in shown.items():
        assert str(OmegaConf.select(config, key)) == str(float(value) if key == "trainer.lr" else value), key


def test_the_layout_names_what_there_is():
    (tree,) = re.findall(
        r"^```\n(rlpipe/ .*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL | re.MULTILINE
    )
    for line in tree.splitlines():
        folder = line.split()[0]
        assert (ROOT / folder).is_dir()
        if folder in ("rlpipe/", "tests/"):
            names = re.split(r"[;,] ", line.removeprefix(folder).strip())
            missing = [
                n
                for n in names
                if not ((ROOT / folder / n).is_dir() or (ROOT / folder / f"{n}.py").is_file())
            ]
            assert missing == []


def test_no_file_speaks_of_one_machine_or_of_a_package_registry():
    home, checkout = "/root" + "/", "/work" + "/main"
    hosts = ["pypi" + ".org", "pythonhosted" + ".org", "deb.debian" + ".org", "download.pytorch" + ".org"]
    found = []
    for path in repository():
        text = path.read_text(encoding="utf-8", errors="ignore")
        found += [(str(path.relative_to(ROOT)), word) for word in (home, checkout, *hosts) if word in text]
    assert not found


FILES = re.compile(r"metrics\.jsonl|model\.(mtp_layers|safetensors)|\w+\.py")


def settings_named(text):
    """The settings between each pair of backticks: `section.key` or `section.key=value`, one or more."""
    sections = "|".join(field.name for field in dataclasses.fields(Config))
    for spoken in re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        found = re.findall(rf"(?<!\S)((?:{sections})(?:\.[a-z_0-9]+)+)(?:=(\S+))?(?!\S)", spoken)
        yield spoken, [(key, value) for key, value in found if not FILES.match(key)]


def unknown_settings(text):
    """Where a text names settings that do not exist, or that do not take the values given with them."""
    plain = OmegaConf.structured(Config)
    for spoken, settings in settings_named(text):
        try:
            for key, _ in settings:
                parent, _, name = key.rpartition(".")
                assert name in OmegaConf.select(plain, parent), f"{key} does not exist"
            given = [(key, value) for key, value in settings if re.fullmatch(r"[a-z_0-9.-]+", value)]
            config = OmegaConf.structured(Config) if given else plain
            for key, value in given:
                OmegaConf.update(config, key, yaml.safe_load(value))
            if given:
                OmegaConf.to_object(config)
        except Exception as error:  # whatever OmegaConf or the checks of a section raise
            yield f"{spoken}: {error}"


@pytest.mark.parametrize(
    "document",
    [
        *("coming_from", "faq", "your_model", "clusters", "when_mtp_pays", "glossary", "reading_the_report"),
        *("tuning", "stuck", "parallelism", "lora", "several_nodes", "eight_gpus", "models"),
    ],
)
def test_every_setting_that_a_page_names_exists(document):
    text = (ROOT / "docs" / f"{document}.md").read_text()
    if document == "coming_from":  # ours stand in the second column
        text = "\n".join(line.split(" | ")[1] for line in text.splitlines() if line.startswith("| `"))
    assert list(unknown_settings(text)) == []


def test_a_setting_that_does_not_exist_is_found():
    text = "`spec.gama` `algo.correction=tis trainer.lr=1e-6` `spec.gamma spec.mode=none` [a](run.md)"
    found = [problem.partition(":")[0] for problem in unknown_settings(text)]
    assert found == ["spec.gama", "algo.correction=tis trainer.lr=1e-6"]
