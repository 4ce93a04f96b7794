"""What the documents say about the code is what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ringfence.cli import inside

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def table_after(page: str, heading: str) -> list[list[str]]:
    """Rows (without head) of the first table below a heading."""
    text = (ROOT / page).read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2]
    lines = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert lines, f"{page}: no table below {heading}"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[0].splitlines()[2:]]


def test_every_promise_of_the_security_page_is_one_that_probe_checks() -> None:
    promised = {row[0].strip("`") for row in table_after("docs/SECURITY.md", "Promises")}
    assert promised == {*inside.ATTEMPTS, "limits", "clean-up"}


def test_the_runtimes_marked_as_built_are_those_that_exist() -> None:
    from ringfence.runtimes import registry

    rows = table_after("README.md", "Runtimes")
    built = {name for row in rows if row[3].startswith("built") for name in re.findall("`([a-z-]+)`", row[0])}
    assert built == {*registry.names(), *registry.NOT_WALLS}
    assert all(row[3].startswith(("built", "not built")) for row in rows)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
