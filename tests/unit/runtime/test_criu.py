"""What CRIU's log says, made into a sentence and a remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from hooks.participant import CriuSettings
from runtime import criu
from runtime.errors import EngineError

LOG = """\
(00.010000) Dumping processes (pid: 7)
(00.070000) Error (criu/util.c:1534): rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted
(00.120000) Error (criu/sk-unix.c:835): sk unix: Can't dump half of stream unix connection.
(00.130000) Error (criu/cr-dump.c:2111): Dumping FAILED.
"""


def test_the_first_error_decides(tmp_path: Path) -> None:
    log = tmp_path / "dump.log"
    log.write_text(LOG)
    failure = criu.failure(log, tmp_path / "kept", "web")
    assert failure.line == "Error (criu/sk-unix.c:835): sk unix: Can't dump half of stream unix connection."
    assert "outside the container" in failure.hint
    assert failure.log is not None
    assert failure.log.read_text() == LOG
    assert failure.log.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("Error (criu/vdso.c:1): vdso: Unexpected rt vDSO area bounds", "too old"),
        ("Error (criu/sockets.c:1): sockets: Can't get 1:16 opt: Operation not supported", "4.2"),
        ("Error (criu/sk-inet.c:1): Can't bind inet socket: Cannot assign requested address", "--tcp close"),
        ("Error (criu/files-reg.c:1): File tmp/x has bad size 3 (expect 2)", "different"),
        ("Error (criu/image.c:1): Can't write: No space left on device", "free space"),
    ],
)  # fmt: skip
def test_known_errors_have_a_remedy(tmp_path: Path, line: str, hint: str) -> None:
    (tmp_path / "log").write_text(f"(00.1) {line}\n")
    assert hint in criu.failure(tmp_path / "log", tmp_path, "x").hint


def test_no_log_is_said(tmp_path: Path) -> None:
    assert "no log" in criu.failure(tmp_path / "none", tmp_path, "x").line


def test_the_configuration_file_is_private_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "private" / "criu.conf"
    criu.write_config(path, CriuSettings({"tcp-established", "file-locks"}, [("external", "net[1]:x")]))
    assert path.read_text() == "file-locks\ntcp-established\nexternal net[1]:x\n"
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("text", ["/w\naction-script /x", "a b", "a#b", "", "a\\b", "\udc80", '"a"'])
def test_nothing_a_container_names_becomes_another_option(tmp_path: Path, text: str) -> None:
    with pytest.raises(EngineError):
        criu.write_config(tmp_path / "criu.conf", CriuSettings(set(), [("irmap-scan-path", text)]))
    assert not (tmp_path / "criu.conf").exists()
