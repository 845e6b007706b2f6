"""Links of the documents lead somewhere, every page is in the navigation, and the site builds."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]
PLACES = [str(document.relative_to(ROOT)) for document in DOCUMENTS]
FENCE = re.compile(r"^( *)(`{3,}|~{3,}).*?^ *\2`*~* *$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(<?([^)>\s]+)>?(?: \"[^\"]*\")?\)")
ELSEWHERE = re.compile(r"[a-z]+:", re.IGNORECASE)


class Settings(yaml.SafeLoader):
    """Reads mkdocs.yml without the Python functions that it names."""


Settings.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
SITE = yaml.load((ROOT / "mkdocs.yml").read_text(), Settings)


def prose(document):
    """Return the text of a document without its blocks of code."""
    return FENCE.sub("", document.read_text())


def anchors(document):
    """Return the anchors of a document's headings, as GitHub and the site make them."""
    found = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", prose(document), flags=re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        text = re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-")
        number = sum(one == text or one.startswith(f"{text}_") for one in found)
        found.add(f"{text}_{number}" if number else text)
    return found


def links(document):
    """Return the relative links of a document: images too, but no code."""
    text = re.sub(r"(`+)(?:(?!\1).)+\1", "``", prose(document))
    return [link for link in LINK.findall(text) if not ELSEWHERE.match(link)]


def paths(navigation):
    """Return the pages of a part of the navigation."""
    if isinstance(navigation, str):
        return [navigation]
    parts = navigation if isinstance(navigation, list) else navigation.values()
    return [path for part in parts for path in paths(part)]


@pytest.mark.parametrize("place", PLACES)
def test_every_link_leads_to_a_file_and_an_anchor_that_exist(place):
    document = ROOT / place
    for link in links(document):
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), f"{place}: {link} does not exist"
        if document.is_relative_to(DOCS):
            inside = target.is_relative_to(DOCS) and target.is_file()
            assert inside, f"{place}: {link} is no file of docs/; name it in backticks"
        if anchor:
            assert anchor in anchors(target), f"{place}: {link}: no such heading"


def test_every_page_is_once_in_the_navigation():
    listed = paths(SITE["nav"])
    assert sorted(listed) == [page.relative_to(DOCS).as_posix() for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_a_page_has_a_title_and_less_than_2500_words(page):
    text = page.read_text()
    assert re.findall(r"^# .+", prose(page), flags=re.MULTILINE)[0] == text.splitlines()[0]
    assert len(text.split()) < 2500


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_lists_are_lists_on_the_site_too(page):
    """Python-Markdown needs an empty line before a list, and four blanks before a nested one."""
    before = ""
    for line in prose(page).splitlines():
        item = re.match(r"( *)(?:[-*+]|\d+\.) ", line)
        if item:
            begins = (
                not before.strip() or before.startswith(" ") or re.match(r"[-*+] |\d+\. ", before)
            )
            assert begins, f"an empty line is missing before: {line}"
            assert len(item[1]) % 4 == 0, f"indent by four: {line}"
        before = line


@pytest.mark.slow
@pytest.mark.skipif(find_spec("mkdocs") is None, reason="mkdocs is not installed (extra `docs`)")
def test_the_site_builds_without_a_warning_and_its_pages_fetch_nothing(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "true"}
    built = subprocess.run(
        command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    loads = re.compile(r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=[\"']?(?:https?:)?//[^>]*>")
    for page in tmp_path.rglob("*.html"):
        assert loads.findall(page.read_text()) == [], page
    for sheet in tmp_path.rglob("*.css"):
        assert not re.search(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", sheet.read_text()), sheet
