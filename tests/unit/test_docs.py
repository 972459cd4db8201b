"""Links in the pages for people lead somewhere."""

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)\s]*)?\)")


def dead_links(page: Path) -> list[str]:
    """Relative link targets of a Markdown page that do not exist."""
    targets = [target for target in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in target]
    return [f"{page.name} links to {target}" for target in targets if not (page.parent / target).exists()]


def test_every_relative_link_in_the_docs_leads_to_a_file():
    pages = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
    assert [fault for page in pages for fault in dead_links(page)] == []


def test_a_dead_link_is_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("[gone](gone.md#part) [self](page.md) [web](https://example.org/x)")
    assert dead_links(page) == ["page.md links to gone.md"]
