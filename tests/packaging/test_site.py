"""The documentation site: built strictly without a network, complete, and asking nothing of other hosts."""

from __future__ import annotations

import functools
import http.server
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path

import pytest
from mkdocs.config import load_config
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from tests.helpers.browser import chromium
from tests.helpers.cli import ROOT

pytestmark = pytest.mark.packaging


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built in a network namespace of its own, where nothing can be reached."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    alone = [shutil.which("bwrap"), "--dev-bind", "/", "/", "--unshare-net"]
    done = subprocess.run(
        [*alone, *command],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


class Tags(HTMLParser):
    """What a page loads (not what it links to), and its ids."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids.add(found.get("id") or "")
        if tag != "a" and found.get("rel") != "canonical":
            self.loads += [value for key in ("src", "href") if (value := found.get(key))]


def pages(site: Path) -> dict[str, Tags]:
    return {path.relative_to(site).as_posix(): Tags(path.read_text()) for path in site.rglob("*.html")}


def test_every_document_is_a_page_and_none_loads_from_another_host(site: Path) -> None:
    found = pages(site)
    for document in sorted((ROOT / "docs").rglob("*.md")):
        page = document.relative_to(ROOT / "docs")
        folder = page.parent if page.stem == "index" else page.with_suffix("")
        assert (folder / "index.html").as_posix() in found
    for recipe in (ROOT / "recipes").glob("*/README.md"):
        assert f"recipes/{recipe.parent.name}/index.html" in found
    for name, tags in found.items():
        assert [load for load in tags.loads if re.match(r"(https?:)?//", load)] == [], name


def test_the_navigation_has_at_most_forty_pages() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    assert 20 < len(re.findall(r": \S+\.md$", navigation, flags=re.MULTILINE)) <= 40


def test_the_reference_has_every_public_name_of_its_modules(site: Path) -> None:
    """Against the modules themselves, imported: what is public there is a heading here."""
    found = pages(site)
    shown = 0
    for page in sorted((ROOT / "docs" / "reference").glob("*.md")):
        if page.stem == "index":
            continue
        ids = found[f"reference/{page.stem}/index.html"].ids
        for name in re.findall(r"^::: (\S+)$", page.read_text(), flags=re.MULTILINE):
            module = importlib.import_module(name)
            own = {
                f"{name}.{key}"
                for key, value in vars(module).items()
                if not key.startswith("_") and getattr(value, "__module__", None) == name and callable(value)
            }
            missing = {key for key in own - ids if has_docstring(key)}
            assert not missing, page.name
            shown += len(own)
    assert shown > 150


def has_docstring(name: str) -> bool:
    """Whether an object has a docstring of its own; the others are left out of the reference."""
    module, _, key = name.rpartition(".")
    return bool(getattr(importlib.import_module(module), key).__doc__)


def test_a_browser_asks_no_other_host_and_the_search_works(site: Path) -> None:
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(site))
    handler.log_message = lambda *_: None  # type: ignore[attr-defined]
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, chromium() as browser:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        here = f"http://127.0.0.1:{server.server_address[1]}/"
        page = browser.new_page()
        asked, errors = [], []
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda m: m.type == "error" and errors.append(m.text))
        for name in ("", "tutorial/", "recipes/swe_rl/", "reference/verify/", "metrics/"):
            assert page.goto(here + name, wait_until="networkidle").ok
            broken = "[...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)"
            assert page.evaluate(broken) == [], name
        page.goto(here)
        page.fill("input[name=query]", "staleness")
        page.wait_for_selector(".md-search-result__item a", timeout=90_000)
        server.shutdown()
    assert errors == []
    assert len(asked) > 20
    assert [url for url in asked if not url.startswith((here, "data:", "blob:"))] == []


def hooks():
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "scripts" / "lib" / "site_hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("[a](decoding.md#x)", "[a](decoding.md#x)"),
        ("[a](../recipes/swe_rl/README.md)", "[a](recipes/swe_rl/README.md)"),
        ("[a](../README.md)", "[a](index.md)"),
        ("[a](../rlpipe/types.py)", "a (`rlpipe/types.py`)"),
        ("[`a`](../rlpipe/types.py)", "`a`"),
        ("[types.py](../rlpipe/types.py)", "`rlpipe/types.py`"),
        ("[a](https://host/x)", "[a](https://host/x)"),
        ("[a](gone.md)", "[a](gone.md)"),
        ("`[a](../README.md)`", "`[a](../README.md)`"),
        ("```\n[a](../README.md)\n```", "```\n[a](../README.md)\n```"),
        ('<img src="architecture.svg">', '<img src="../architecture.svg">'),
    ],
)
def test_links_are_mended_outside_of_code(written: str, shown: str) -> None:
    config = load_config(str(ROOT / "mkdocs.yml"))
    names = ["decoding.md", "alarms.md", "architecture.svg"]
    files = Files([File(name, str(ROOT / "docs"), config.site_dir, True) for name in names])
    config.plugins._current_plugin = "site_hooks"  # as mkdocs has it while a hook runs
    files = hooks().on_files(files, config)
    page = Page(None, files.get_file_from_path("alarms.md"), config)
    assert hooks().on_page_markdown(written, page, config, files) == shown
