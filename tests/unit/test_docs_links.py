"""Every link in the documents leads somewhere, and every `make` target they name exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("tests/*.md")])

_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|^\[[^\]]+\]:\s+(\S+)", re.MULTILINE)
_IMAGE = re.compile(r"!\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*$", re.MULTILINE)
_TARGET = re.compile(r"\bmake ([a-z][a-z-]*)\b")


def _links(text: str) -> Iterator[str]:
    prose = re.sub(r"`[^`\n]*`", "", _FENCE.sub("", text))
    for found in (*_LINK.finditer(prose), *_IMAGE.finditer(prose)):
        yield next(group for group in found.groups() if group)


def _anchors(text: str) -> set[str]:
    """The fragments that headings have, by the rule of the usual Markdown hosts."""
    anchors: set[str] = set()
    for heading in _HEADING.findall(_FENCE.sub("", text)):
        kept = re.sub(r"[^\w\- ]", "", heading.lower().replace("`", ""))
        anchor = kept.replace(" ", "-")
        same = sum(1 for known in anchors if known == anchor or known.startswith(f"{anchor}-"))
        anchors.add(f"{anchor}-{same}" if anchor in anchors else anchor)
    return anchors


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    text = document.read_text()
    broken = []
    for link in _links(text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, fragment = link.partition("#")
        target = (document.parent / path) if path else document
        if not target.exists() or not target.resolve().is_relative_to(ROOT):
            broken.append(f"{link}: no such file")
        elif fragment and target.suffix == ".md" and fragment not in _anchors(target.read_text()):
            broken.append(f"{link}: {target.name} has no such heading")
    assert not broken


def test_make_targets_named_in_documents_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    named = {
        (document.name, target)
        for document in DOCUMENTS
        for code in re.findall(r"`([^`\n]+)`", document.read_text())
        for target in _TARGET.findall(code)
    }
    assert {f"{name}: make {target}" for name, target in named if target not in targets} == set()
