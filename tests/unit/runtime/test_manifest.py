"""cedana.json: what was asked of CRIU is replayed, what an artifact may not ask for is dropped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hooks.participant import CriuSettings
from runtime.errors import RestoreError
from runtime.manifest import DumpManifest


def test_settings_come_back(tmp_path: Path) -> None:
    settings = CriuSettings({"tcp-established", "file-locks"}, [("ghost-limit", "4194304")])
    DumpManifest.of(settings, {"tcp": "established"}, {"network": {"a": 1}}, []).write(tmp_path)
    found = DumpManifest.read(tmp_path)
    assert found.criu_settings() == settings
    assert found.participants == {"network": {"a": 1}}
    assert (tmp_path / "cedana.json").stat().st_mode & 0o777 == 0o600


def test_images_of_another_tool_get_every_option_a_restore_may_need(tmp_path: Path) -> None:
    assert "tcp-established" in DumpManifest.read(tmp_path).criu_settings().flags


def test_an_artifact_cannot_make_criu_run_or_write_anything(tmp_path: Path) -> None:
    hostile = {
        "flags": ["tcp-established", "shell-job", "leave-running", "tcp-established\naction-script /evil"],
        "values": [["action-script", "1"], ["log-file", "2"], ["ghost-limit", "12"]],
        "options": {},
        "participants": {},
        "processes": [],
    }
    (tmp_path / "cedana.json").write_text(json.dumps(hostile))
    settings = DumpManifest.read(tmp_path).criu_settings()
    assert settings.flags == {"tcp-established"}
    assert settings.values == [("ghost-limit", "12")]


@pytest.mark.parametrize(
    "value",
    [[], {}, {"flags": 1}, "x", {"flags": [], "values": [["ghost-limit", "12\nevil"]], "options": {},
     "participants": {}, "processes": []}, {"flags": [[]], "values": [], "options": {},
     "participants": {}, "processes": []}],
)  # fmt: skip
def test_malformed_manifests_are_refused(tmp_path: Path, value: Any) -> None:
    (tmp_path / "cedana.json").write_text(json.dumps(value))
    with pytest.raises(RestoreError):
        DumpManifest.read(tmp_path)
