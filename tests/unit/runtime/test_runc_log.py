"""What runc and crun say in their logs when they fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.runc import last_error

RUNC = (
    '{"level":"warning","msg":"slow","time":"now"}\n'
    '{"level":"error","msg":"runc create failed: no","time":"now"}\n'
)
CRUN = '{\n  "msg": "cgroups in hybrid mode not supported",\n  "level": "error",\n  "time": "now"\n}\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (RUNC, "runc create failed: no"),
        (CRUN, "cgroups in hybrid mode not supported"),
        (RUNC + CRUN, "cgroups in hybrid mode not supported"),
        (CRUN + '{"level":"info","msg":"done"}', "cgroups in hybrid mode not supported"),
        (CRUN + '{"level":"error","msg":"cut o', "cgroups in hybrid mode not supported"),
        ("panic: out of memory\n", ""),
        ("{" * 1000, ""),
        ('{"level":"error"}', ""),
        ("", ""),
    ],
)
def test_the_last_error_is_found_in_either_form(tmp_path: Path, text: str, said: str) -> None:
    log = tmp_path / "log.json"
    log.write_text(text)
    assert last_error(log) == said


def test_a_log_that_is_missing_says_nothing(tmp_path: Path) -> None:
    assert last_error(tmp_path / "none") == ""
