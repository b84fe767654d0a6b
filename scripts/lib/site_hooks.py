"""Hooks of the documentation site (mkdocs.yml): documents outside docs/, and links between all of them.

Documents are written for a repository browser: their links are relative to their own folder. Here README.md
becomes the home page, and recipes and model cards become pages. A link to a file that is not a page becomes
its path as text, because the site knows no address of the repository.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "CODE_OF_CONDUCT.md": "code_of_conduct.md",
}
FOLDERS = {"recipes": (".md", ".svg", ".png", ".json"), "models": (".md",)}
CLUSTER_FILES = "cluster_files.md"
_CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.DOTALL)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_IMAGE = re.compile(r'\bsrc="([^"]+)"')


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the documents outside docs/."""
    for source, target in _outside().items():
        listed = source == "README.md"  # the others are only linked to
        inclusion = InclusionLevel.INCLUDED if listed else InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, target, abs_src_path=str(ROOT / source), inclusion=inclusion))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Adapt the links of a page, outside of code."""
    source = Path(page.file.abs_src_path).resolve().relative_to(ROOT)

    def link(match: re.Match[str]) -> str:
        image, text, target = match.groups()
        found = _mended(target, source, page.file.src_uri, files)
        if found is None:
            path = _resolved(target, source)
            if f"/{path}".endswith(f"/{text}"):  # the text is the path or its end
                return f"`{path}`"
            return text if text.startswith("`") else f"{text} (`{path}`)"
        return f"{image}[{text}]({found})"

    def src(match: re.Match[str]) -> str:
        return f'src="{_mended(match[1], source, page.file.src_uri, files, html=True) or match[1]}"'

    parts = _CODE.split(markdown)
    return "".join(p if i % 2 else _IMAGE.sub(src, _LINK.sub(link, p)) for i, p in enumerate(_joined(parts)))


def _joined(parts: list[str]) -> list[str]:
    """Return text and code alternately; a link with code in its text stays in one piece of text."""
    whole: list[str] = [parts[0]]
    for code, text in zip(parts[1::2], parts[2::2], strict=True):
        if not code.startswith("```") and whole[-1].rfind("[") > whole[-1].rfind("]") and "](" in text:
            whole[-1] += code + text
        else:
            whole += [code, text]
    return whole


def _outside() -> dict[str, str]:
    """Return the page of every document outside docs/, by its path in the repository."""
    found = dict(PAGES)
    for folder, suffixes in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*")):
            name = path.relative_to(ROOT).as_posix()
            shown = path.suffix == ".md" or (folder == "recipes" and path.suffix in suffixes)
            if path.is_file() and shown:
                found[name] = name
    found["docker/cluster/README.md"] = CLUSTER_FILES
    return found


def _resolved(target: str, source: Path) -> str:
    return posixpath.normpath(posixpath.join(source.parent.as_posix(), target.partition("#")[0]))


def _mended(target: str, source: Path, page: str, files: Files, html: bool = False) -> str | None:
    """Return the link as seen from the page; None if it leads to a file that is not a page.

    A broken link is not changed, so that a strict build fails.
    """
    path, hash_, anchor = target.partition("#")
    wanted = _resolved(target, source)
    if re.match(r"[a-z]+:", target) or not path or not (ROOT / wanted).exists():
        return target
    uri = wanted.removeprefix("docs/") if wanted.startswith("docs/") else _outside().get(wanted)
    file = files.get_file_from_path(uri) if uri else None
    if file is None:
        return None
    if html:
        here = files.get_file_from_path(page)
        return posixpath.relpath(file.dest_uri, posixpath.dirname(here.dest_uri) or ".")
    return posixpath.relpath(uri, posixpath.dirname(page) or ".") + hash_ + anchor
