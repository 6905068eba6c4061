"""The link checkers find every kind of broken link."""

from __future__ import annotations

from pathlib import Path

from tests.links import check_repository, check_site


def test_broken_links_of_markdown_files_are_found(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(
        "[page](docs/page.md) [folder](docs/) [web](https://example.org/a) [heading](docs/page.md#c--d-1)\n"
        "[file](docs/a.md) [anchor](docs/page.md#d) ![image](b.svg) <img src='c.svg'> `[code](d.md)`\n"
    )
    (tmp_path / "docs" / "page.md").write_text(
        "# C & `d`\n\n## C & *d*\n\n[up](../README.md) [here](#c--d)\n\n[above](../../README.md) [here](#e)\n"
    )
    assert list(check_repository(tmp_path, ["README.md", "docs/page.md"])) == [
        "README.md: docs/a.md: there is no file docs/a.md",
        "README.md: docs/page.md#d: docs/page.md has no anchor #d",
        "README.md: b.svg: there is no file b.svg",
        "README.md: c.svg: there is no file c.svg",
        "docs/page.md: ../../README.md: there is no file ../README.md",
        "docs/page.md: #e: docs/page.md has no anchor #e",
    ]


def test_broken_links_of_a_site_are_found(tmp_path: Path) -> None:
    (tmp_path / "usage").mkdir()
    (tmp_path / "index.html").write_text(
        "<h1 id='top'>A</h1> <a href='usage/#b'></a> <a href='.'></a> <a href='/usage/'></a> <a href='#'></a>"
        "<a href='use/'></a> <a href='usage/#top'></a> <img src='b.svg'> <script src='js/c.js'></script>"
    )
    (tmp_path / "usage" / "index.html").write_text("<p id='b'> <a href='..#top'></a> <a href='#c'></a>")
    assert list(check_site(tmp_path)) == [
        "index.html: use/: there is no file use",
        "index.html: usage/#top: usage/index.html has no anchor #top",
        "index.html: b.svg: there is no file b.svg",
        "index.html: js/c.js: there is no file js/c.js",
        "usage/index.html: #c: usage/index.html has no anchor #c",
    ]
