"""What mkdocs calls while it builds the site (`make docs`).

It adds the pages that are generated: the reference, and the README as the first page. It makes a link of each path of
a page (`docs/guide.md`), and plain text of links that leave the folder of the pages. Pages in Korean and chapters of
the tutorial are in the navigation because they are there; each chapter offers its notebook (`docs/notebooks.py`).
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from docs.generate_reference import pages
from docs.notebooks import as_file, chapters, notebook_of
from docs.page_text import LINK, ROOT, headings, prose

GENERATED = {"index.md": "README.md", "ko/index.md": "README.ko.md"}  # page of the site -> file of the repository
# The tutorial's folder in each language, and what its chapters call their notebooks.
TUTORIALS = {"tutorial": "This chapter as a notebook", "ko/tutorial": "이 장을 노트북으로 받기"}
PATH = re.compile(r"(?<!\[)`((?:docs/[\w/.-]+|README(?:\.\w+)?)\.md)`(?!\])")


def on_config(config: Any) -> Any:
    from markdown.extensions.toc import slugify_unicode

    config["mdx_configs"].setdefault("toc", {})["slugify"] = slugify_unicode  # titles in Korean are anchors too
    add_pages(config["nav"])
    return config


def add_pages(nav: list[Any]) -> None:
    """Adds the tutorial behind the page with which people start, and the pages in Korean at the end, README first."""
    if tutorial := tutorial_nav("tutorial"):
        nav[:] = [entry for one in nav for entry in ([one, tutorial] if "Start" in one else [one])]
    readme = [(ROOT / "README.ko.md", "ko/index.md")]
    found = [*readme, *((path, f"ko/{path.name}") for path in sorted((ROOT / "docs" / "ko").glob("*.md")))]
    korean: list[Any] = []
    for path, uri in found:
        korean += [{title_of(path): uri}] if path.exists() else []
        if uri == "ko/start.md" and (tutorial := tutorial_nav("ko/tutorial")):
            korean.append(tutorial)
    if korean:
        nav.append({"한국어": korean})


def tutorial_nav(folder: str) -> dict[str, list[Any]] | None:
    """A tutorial's pages by their titles, its list first; None where there is none."""
    index = ROOT / "docs" / folder / "index.md"
    if not index.exists():
        return None
    listed = [{title_of(page): f"{folder}/{page.name}"} for page in chapters(index.parent)]
    return {title_of(index): [f"{folder}/{index.name}", *listed]}


def title_of(page: Path) -> str:
    return headings(page.read_text(encoding="utf-8"))[0][1]


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File  # pyright: ignore[reportMissingImports]  of the site's environment alone

    texts = {f"reference/{name}": text for name, text in pages().items()}
    texts |= {
        uri: (ROOT / name).read_text(encoding="utf-8") for uri, name in GENERATED.items() if (ROOT / name).exists()
    }
    texts |= {
        f"{folder}/{page.stem}.ipynb": as_file(notebook_of(page))
        for folder in TUTORIALS
        for page in chapters(ROOT / "docs" / folder)
    }
    for uri, text in texts.items():
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    uri = PurePosixPath(page.file.src_uri)
    text = for_site(markdown, page.file.src_uri)
    words = TUTORIALS.get(str(uri.parent))
    if words is None or uri.name == "index.md":
        return text
    return f'{text}\n<a href="{uri.stem}.ipynb" download>{words}</a>\n'


def on_post_page(output: str, page: Any, **_: Any) -> str:
    return output.replace('lang="en"', 'lang="ko"', 1) if page.file.src_uri.startswith("ko/") else output


def for_site(text: str, uri: str) -> str:
    """The text of the page `uri` of the site, with its links as they are there."""
    source = PurePosixPath(GENERATED.get(uri, f"docs/{uri}"))
    lines = text.splitlines()
    for number, line in prose(text):
        line = LINK.sub(lambda link: _moved(link, source, uri), line)
        lines[number - 1] = PATH.sub(lambda path: _to_page(path, uri), line)
    return "\n".join(lines) + "\n"


def _to_page(path: re.Match[str], uri: str) -> str:
    """A link to the page whose path is named."""
    page = page_of(path[1])
    return path[0] if page in (None, uri) else f"[{path[0]}]({relpath(page, PurePosixPath(uri).parent)})"  # pyright: ignore


def _moved(link: re.Match[str], source: PurePosixPath, uri: str) -> str:
    """A link of the file `source` as it is on the page `uri`; text, where it leads to no page."""
    sign, text, target = link.groups()
    path, mark, anchor = target.partition("#")
    named = normpath(source.parent / path)
    stays = uri not in GENERATED and named.startswith("docs/")
    if "://" in target or not path or stays:
        return link[0]
    page = page_of(named)
    if page is None:
        return f"{text} (`{named}`)"
    return f"{sign}[{text}]({relpath(page, PurePosixPath(uri).parent)}{mark}{anchor})"


def page_of(path: str) -> str | None:
    """The page or picture of the site for a path of the repository; None where there is none."""
    generated = {name: uri for uri, name in GENERATED.items()}
    if path in generated:
        return generated[path]
    return path.removeprefix("docs/") if path.startswith("docs/") and Path(ROOT, path).is_file() else None
