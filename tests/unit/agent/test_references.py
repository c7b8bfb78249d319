from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import artifacts
import pytest
from test_target_spec import ordinary

from agent import node, references
from base.config import Config
from base.errors import NotFoundError, UsageError
from base.trace import Trace
from oci.layout import Layout


@pytest.fixture
def take(config: Config, tmp_path: Path) -> Callable[[str], str]:
    base, _ = artifacts.image(tmp_path / "image")
    return lambda tag: artifacts.checkpoint(config.layout_dir, base, ordinary(), tag).digest


def test_checkpoint_goes_to_the_nodes_own_layout_under_name_and_time(config: Config) -> None:
    target = references.target("", "web", config)
    assert re.fullmatch(rf"oci:{config.layout_dir}:web-\d{{8}}T\d{{6}}Z", str(target))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("oci:/x:tag", r"oci:/x:tag"),
        ("oci:/x", r"oci:/x:web-\d{8}T\d{6}Z"),
        ("reg.example:5000/a/b:1", r"reg.example:5000/a/b:1"),
        ("reg.example:5000/a/b", r"reg.example:5000/a/b:web-\d{8}T\d{6}Z"),
    ],
)
def test_target_without_a_tag_gets_one(config: Config, text: str, expected: str) -> None:
    assert re.fullmatch(expected, str(references.target(text, "web", config)))


def test_bare_target_is_a_tag_of_the_own_layout(config: Config) -> None:
    assert str(references.target("mine", "web", config)) == f"oci:{config.layout_dir}:mine"


def test_target_by_digest_is_refused(config: Config) -> None:
    with pytest.raises(UsageError):
        references.target(f"oci:/x@sha256:{'0' * 64}", "web", config)


@pytest.mark.parametrize("name", ["a/b c", "ü", "-x", "." * 10, "x" * 300])
def test_any_container_name_makes_a_tag(config: Config, name: str) -> None:
    assert references.target("", name, config).tag


def test_bare_name_means_the_newest_checkpoint(config: Config, take: Callable[[str], str]) -> None:
    for tag in ("web-20260101T000000Z", "web-20270101T000000Z", "web-2-20280101T000000Z", "db"):
        take(tag)
    assert references.existing("web", config).tag == "web-20270101T000000Z"
    assert references.existing("db", config).tag == "db"
    assert references.existing("web-20260101T000000Z", config).tag == "web-20260101T000000Z"


def test_bare_digest_is_of_the_own_layout(config: Config, take: Callable[[str], str]) -> None:
    digest = take("web")
    assert str(references.existing(digest, config)) == f"oci:{config.layout_dir}@{digest}"


def test_unknown_name_is_not_found(config: Config, take: Callable[[str], str]) -> None:
    with pytest.raises(NotFoundError):
        references.existing("web", config)
    take("web")
    with pytest.raises(NotFoundError):
        references.existing("we", config)


def test_layout_with_one_checkpoint_needs_no_tag(config: Config, take: Callable[[str], str]) -> None:
    take("only")
    assert references.existing(f"oci:{config.layout_dir}", config).tag == "only"
    take("other")
    with pytest.raises(UsageError) as caught:
        references.existing(f"oci:{config.layout_dir}", config)
    assert "only, other" in caught.value.hint


def test_registry_without_a_tag_means_latest(config: Config) -> None:
    assert str(references.existing("reg.example/a", config)) == "reg.example/a:latest"


def test_ls_shows_checkpoints_and_what_is_none(config: Config, take: Callable[[str], str]) -> None:
    take("b")
    Layout(config.layout_dir).put_manifest(
        artifacts.MANIFEST, b'{"schemaVersion":2,"config":{},"layers":[]}', "odd"
    )
    _, entries = node.ls("", config)
    assert [(entry.tag, entry.artifact is not None) for entry in entries] == [("odd", False), ("b", True)]
    assert entries[0].error


def test_ls_of_nothing_is_empty(config: Config) -> None:
    assert node.ls("", config)[1] == []


def test_rm_deletes_by_name_and_digest(config: Config, take: Callable[[str], str]) -> None:
    take("web-20260101T000000Z")
    take("web-20270101T000000Z")
    assert [r.tag for r in node.rm(["web"], config)] == ["web-20270101T000000Z"]
    assert Layout(config.layout_dir).tags() == ["web-20260101T000000Z"]
    with pytest.raises(NotFoundError):
        node.rm(["db"], config)


def test_inspect_opens_the_artifact(config: Config, take: Callable[[str], str]) -> None:
    take("web")
    assert node.inspect("web", config).artifact.record.processes[0].argv == ("sh", "-c", "x")


def test_push_keeps_the_tag_and_pull_names_it_after_the_container(
    config: Config, take: Callable[[str], str], tmp_path: Path
) -> None:
    digest = take("web")
    pushed = node.push("web", f"oci:{tmp_path}/other", config, Trace())
    assert (str(pushed.target), pushed.manifest.digest) == (f"oci:{tmp_path}/other:web", digest)
    pulled = node.pull(f"oci:{tmp_path}/other:web", "", config, Trace())
    assert str(pulled.target) == f"oci:{config.layout_dir}:c1-20261203T070000Z"
    assert node.inspect("c1", config).artifact.manifest.digest == digest
    assert node.pull(f"oci:{tmp_path}/other:web", "mine", config, Trace()).target.tag == "mine"
