"""The checkpoint's record and other JSON from outside: round trip, schema, and refusal."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import fastjsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

import oci
from oci.decode import dump_json, load_json
from oci.errors import ArtifactError
from oci.record import CheckpointRecord
from oci.store import Descriptor
from tests.artifacts import RECORD

SCHEMA = json.loads((Path(oci.__file__).parent / "schemas" / "checkpoint.v1.json").read_text())
COMPLETE = replace(RECORD, id="0" * 32)
DIGEST = "sha256:" + "0" * 64


def test_record_comes_back_as_it_was_written() -> None:
    sent = replace(COMPLETE, processes=COMPLETE.processes[:1])
    assert CheckpointRecord.from_json(load_json(dump_json(sent.to_json()), "it")) == sent


def test_argument_that_is_no_unicode_does_not_stop_a_checkpoint() -> None:
    record = CheckpointRecord.from_json(load_json(dump_json(COMPLETE.to_json()), "it"))
    assert record.processes[1].argv == ("worker", "?")


def test_record_follows_the_published_schema() -> None:
    fastjsonschema.compile(SCHEMA)(load_json(dump_json(COMPLETE.to_json()), "it"))


def test_schema_names_every_field_of_the_record_and_no_other() -> None:
    assert set(SCHEMA["properties"]) == {field.name for field in fields(CheckpointRecord)}


def test_unknown_keys_are_ignored() -> None:
    assert CheckpointRecord.from_json({**plain(), "later": 1}) == CheckpointRecord.from_json(plain())


def plain() -> dict[str, Any]:
    return load_json(dump_json(COMPLETE.to_json()), "it")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"format_version": 2}, "format version 2"),
        ({"format_version": None}, "no format version"),
        ({"id": 7}, r"checkpoint\.id is not a string"),
        ({"node": []}, r"checkpoint\.node is not an object"),
        ({"node": {"hostname": "a", "kernel": "b"}}, r"checkpoint\.node has no architecture"),
        ({"tools": {"a": 1}}, "checkpoint.tools is not a string"),
        ({"memory": {"total": 1.5}}, r"checkpoint\.memory\.total is not an integer"),
        ({"memory": {"total": True}}, r"checkpoint\.memory\.total is not an integer"),
        ({"memory": {"total": 1 << 63}}, "out of range"),
        ({"processes": {}}, r"checkpoint\.processes is not a list"),
        ({"processes": [{"pid": 1}]}, "has no parent"),
        ({"steps": [{"name": "a", "start_s": 1e999, "duration_s": 1}]}, "out of range"),
        ({"mounts": ["\ud800"]}, "out of range"),
        ({"files": [{"process": 1, "fd": 1, "path": "a", "deleted": 1}]}, "not true or false"),
        ({"mounts": ["x" * (1 << 20) + "x"]}, "out of range"),
    ],
)
def test_malformed_record_is_refused_naming_the_field(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ArtifactError, match=told):
        CheckpointRecord.from_json({**plain(), **change})


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b"\xff{}",
        b"[" * 1_000_000,
        b'{"a":' * 500_000,
        b'{"a":' + b"9" * 10_000 + b"}",
    ],
)
def test_what_is_no_proper_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(ArtifactError):
        load_json(body, "it")


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        {"mediaType": "a/b", "digest": "sha256:00", "size": 1},
        {"mediaType": "a/b", "digest": DIGEST + "\n", "size": 1},
        {"mediaType": "a/b", "digest": "sha512:" + "0" * 128, "size": 1},
        {"mediaType": "a/b", "digest": DIGEST, "size": -1},
        {"mediaType": "a/b", "digest": DIGEST, "size": 1 << 60},
        {"mediaType": "a/b", "digest": DIGEST, "size": True},
        {"mediaType": "a/b\r\nX: y", "digest": DIGEST, "size": 1},
        {"mediaType": "a/b", "digest": DIGEST, "size": 1, "annotations": {"a": 1}},
        {"mediaType": "a/b", "digest": DIGEST, "size": 1, "annotations": []} | {"annotations": [1]},
        {"mediaType": "a/b", "digest": DIGEST, "size": 1, "artifactType": 5},
    ],
)
def test_malformed_descriptor_is_refused(value: object) -> None:
    with pytest.raises(ArtifactError):
        Descriptor.from_json(value)


def test_descriptor_comes_back_as_it_was_written() -> None:
    descriptor = Descriptor("a/b", DIGEST, 3, {"k": "v"}, "c/d")
    assert Descriptor.from_json(descriptor.to_json()) == descriptor


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from([field.name for field in fields(CheckpointRecord)]), json_values)
def test_any_value_of_any_field_is_taken_or_refused(name: str, value: object) -> None:
    try:
        CheckpointRecord.from_json({**plain(), name: value})
    except ArtifactError:
        return
