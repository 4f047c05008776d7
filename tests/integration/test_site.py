"""The documentation site, built from the current tree."""

import re

import pytest

from docs.tools.site import HTML, build

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_every_page_is_built_and_makes_no_external_requests() -> None:
    assert build() == HTML / "index.html"
    pages = {str(path.relative_to(HTML)): path.read_text() for path in HTML.rglob("*.html")}
    assert {"index.html", "docs/settings/index.html", "examples/calculator/index.html"} <= set(pages)
    assert {"modules/index.html", "learner/training/trainer/index.html"} <= set(pages)
    loaded = re.compile(r'<(?:script|link|img)[^>]*(?:src|href)="?(https?:[^" >]+)')
    foreign = {address for text in pages.values() for address in loaded.findall(text)}
    assert foreign == set()
