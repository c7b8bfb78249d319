"""References: what is accepted, what it means, and how each wrong one is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from base.errors import UsageError
from oci.reference import LayoutReference, Reference, parse

DIGEST = "sha256:" + "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:5000/web:1", Reference("127.0.0.1:5000", "web", "1")),
        ("localhost/web", Reference("localhost", "web")),
        ("docker.io/library/redis:7", Reference("docker.io", "library/redis", "7")),
        ("[::1]:5000/a/b_c/d-e:T.1-x", Reference("[::1]:5000", "a/b_c/d-e", "T.1-x")),
        (f"r.example/a@{DIGEST}", Reference("r.example", "a", "", DIGEST)),
        (f"r.example/a:t@{DIGEST}", Reference("r.example", "a", "t", DIGEST)),
        ("oci:/var/lib/x", LayoutReference(Path("/var/lib/x"))),
        ("oci:/var/lib/x:web-1", LayoutReference(Path("/var/lib/x"), "web-1")),
        ("oci:/with:colon/x:web", LayoutReference(Path("/with:colon/x"), "web")),
        (f"oci:/x@{DIGEST}", LayoutReference(Path("/x"), "", DIGEST)),
    ],
)
def test_reference_means_what_it_says_and_prints_as_itself(
    text: str, expected: Reference | LayoutReference
) -> None:
    assert parse(text) == expected
    assert str(parse(text)) == text


def test_relative_layout_is_made_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse("oci:store:a") == LayoutReference(tmp_path / "store", "a")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("redis", "names no registry"),
        ("redis:7", "names no registry"),
        ("library/redis:7", "names no registry"),
        ("http://127.0.0.1:5000/web:1", "must not have a scheme"),
        ("r.example/Web:1", "malformed repository"),
        ("r.example/web:", "malformed tag"),
        ("r.example/web:a b", "white space"),
        ("r.example/../x", "malformed repository"),
        ("r.example/web@sha256:12", "malformed digest"),
        ("-r.example/web", "malformed registry"),
        ("oci:", "names no directory"),
        ("oci:/x@sha256:12", "neither a tag nor a digest"),
        ("", "names no registry"),
    ],
)
def test_wrong_reference_is_refused_with_the_reason(text: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        parse(text)


def test_hint_shows_the_reference_with_a_registry() -> None:
    with pytest.raises(UsageError) as raised:
        parse("redis:7")
    assert "127.0.0.1:5000/redis:7" in raised.value.hint


@given(st.text(max_size=60))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        reference = parse(text)
    except UsageError:
        return
    assert parse(str(reference)) == reference
