"""Find broken links in the Markdown files of the repository and in the pages of the built site.

External links are not checked.
"""

from __future__ import annotations

import posixpath
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
SITE = ROOT / "build" / "site"


class Page(HTMLParser):
    """The links, anchors and headings of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.headings: list[str] = []
        self._in_heading = False
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.links += [values[name] for name in ("href", "src") if name in values]
        self.anchors |= {values["id"]} if "id" in values else set()
        if re.fullmatch("h[1-6]", tag):
            self.headings.append("")
            self._in_heading = True

    def handle_endtag(self, tag: str) -> None:
        self._in_heading = self._in_heading and not re.fullmatch("h[1-6]", tag)

    def handle_data(self, data: str) -> None:
        if self._in_heading:
            self.headings[-1] += data


def check_repository(root: Path, names: Collection[str]) -> Iterator[str]:
    """Yield the broken links of the Markdown files among these files, with the anchors of GitHub."""
    render = MarkdownIt("commonmark").enable("table").render
    pages = {name: Page(render((root / name).read_text("utf-8"))) for name in names if name.endswith(".md")}
    for page in pages.values():
        page.anchors.update(github_anchors(page.headings))
    folders = {str(folder) for name in names for folder in PurePosixPath(name).parents}
    return find_broken_links(pages, {*names, *folders})


def github_anchors(headings: Iterable[str]) -> Iterator[str]:
    """Yield the anchors that GitHub gives to the headings of a page."""
    counts: Counter[str] = Counter()
    for heading in headings:
        anchor = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        yield f"{anchor}-{counts[anchor]}" if counts[anchor] else anchor
        counts[anchor] += 1


def check_site(folder: Path) -> Iterator[str]:
    """Yield the broken links of the pages of a site."""
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    pages = {name: Page((folder / name).read_text("utf-8")) for name in names if name.endswith(".html")}
    return find_broken_links(pages, names)


def find_broken_links(pages: Mapping[str, Page], names: Collection[str]) -> Iterator[str]:
    """Yield each link to a missing file or anchor, with the name of its page."""
    for name, page in sorted(pages.items()):
        for link in page.links:
            url = urlsplit(link)
            if url.scheme or url.netloc:
                continue
            path = posixpath.join(posixpath.dirname(name), unquote(url.path)) if url.path else name
            target = posixpath.normpath(path.lstrip("/"))
            index = posixpath.normpath(f"{target}/index.html")
            target = index if index in names else target
            if target not in names:
                yield f"{name}: {link}: there is no file {target}"
            elif url.fragment and target in pages and unquote(url.fragment) not in pages[target].anchors:
                yield f"{name}: {link}: {target} has no anchor #{url.fragment}"


def main() -> None:
    if not (SITE / "index.html").exists():
        sys.exit(f"{SITE} has no pages. Run `make docs`.")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]  # new files, too
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    names = listed.stdout.rstrip("\0").split("\0")
    broken = [*check_repository(ROOT, names), *(f"build/site/{line}" for line in check_site(SITE))]
    sys.exit("\n".join(broken) or None)


if __name__ == "__main__":
    main()
