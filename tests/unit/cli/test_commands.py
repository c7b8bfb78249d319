"""The commands as a person sees them: output, errors, statuses; the node's functions are stood in for."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import base
from agent import node
from agent.checkpoint import Checkpointed
from agent.restore import Restored
from base.errors import CedanaError, NotFoundError, UsageError
from base.trace import Step, Trace
from cli import main
from oci.errors import StoreError
from oci.reference import parse
from oci.store import Descriptor
from runtime.checkpoint import CheckpointResult
from runtime.errors import CheckpointError, IncompatibleError
from runtime.features import Feature

DIGEST = f"sha256:{'a' * 64}"
MANIFEST = Descriptor("application/vnd.oci.image.manifest.v1+json", DIGEST, 1)


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        value = json.loads(self.out)
        assert isinstance(value, dict)
        return value


Cedana = Callable[..., Outcome]


@pytest.fixture
def cedana(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cedana:
    """Runs the command line in this process, on a configuration of its own."""
    config = tmp_path / "config.toml"
    config.write_text(f'state_dir = "{tmp_path}/state"\n[nodes.b]\ncommand = ["ssh", "root@b"]\n')
    monkeypatch.setenv("CEDANA_CONFIG", str(config))
    for name in ("CONTAINERD_ADDRESS", "CONTAINERD_NAMESPACE"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str) -> Outcome:
        try:
            code = main.run(arguments)
        except SystemExit as ended:
            code = int(ended.code or 0)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The node's functions record what they are called with, and answer."""
    seen: list[tuple[Any, ...]] = []

    def checkpoint(container: str, to: str, options: Any, config: Any, trace: Trace) -> Checkpointed:
        seen.append(("checkpoint", container, to, options, config))
        with trace.step("dump"):
            pass
        result = CheckpointResult("abc", MANIFEST, "t", 2048, 1024, 0.25, ())
        return Checkpointed("id-1", "web", parse("oci:/x:t"), result, ("mind the gap",))

    def restore(reference: str, options: Any, config: Any, trace: Trace) -> Restored:
        seen.append(("restore", reference, options, config))
        with trace.step("start"):
            pass
        return Restored("id-1", "web", 42, parse(f"oci:/x@{DIGEST}"), "file:///log")

    monkeypatch.setattr(node, "checkpoint", checkpoint)
    monkeypatch.setattr(node, "restore", restore)
    return seen


def raising(error: BaseException) -> Callable[..., Any]:
    def function(*_: Any) -> Any:
        raise error

    return function


def test_checkpoint_passes_its_options_on(cedana: Cedana, calls: list[tuple[Any, ...]]) -> None:
    arguments = ("checkpoint", "web", "--to", "oci:/x:t", "--leave-running", "--tcp", "close", "-n", "k8s.io")
    done = cedana(*arguments)
    assert done.code == 0
    _, container, to, options, config = calls[0]
    assert (container, to, options.leave_running, options.tcp) == ("web", "oci:/x:t", True, "close")
    assert config.containerd_namespace == "k8s.io"
    assert "web → oci:/x:t" in done.out
    assert "cedana: warning: mind the gap" in done.err


def test_checkpoint_as_json_is_one_object(cedana: Cedana, calls: list[tuple[Any, ...]]) -> None:
    value = cedana("checkpoint", "web", "--json").json
    assert value["container"] == {"id": "id-1", "name": "web"}
    assert (value["reference"], value["digest"], value["frozen_s"]) == ("oci:/x:t", DIGEST, 0.25)
    assert [step["name"] for step in value["steps"]] == ["dump"]


def test_trace_shows_every_step(cedana: Cedana, calls: list[tuple[Any, ...]]) -> None:
    assert re.search(r"dump +█+ +\d+ ms", cedana("checkpoint", "web", "--trace").out)
    assert "█" not in cedana("checkpoint", "web").out


def test_restore_passes_its_options_on(cedana: Cedana, calls: list[tuple[Any, ...]]) -> None:
    done = cedana(
        "restore",
        "web",
        "--name",
        "w2",
        "--bridge",
        "br0",
        "--allow",
        "mounts,devices",
        "--allow",
        "host-pid",
    )
    assert done.code == 0
    _, reference, options, _ = calls[0]
    assert (reference, options.name, options.bridge, options.tcp) == ("web", "w2", "br0", "")
    assert options.allow == {"mounts", "devices", "host-pid"}
    assert "web runs, pid 42" in done.out


def test_restore_as_json_names_container_and_pid(cedana: Cedana, calls: list[tuple[Any, ...]]) -> None:
    value = cedana("restore", "web", "--json").json
    assert value["container"] == {"id": "id-1", "name": "web", "pid": 42}
    assert value["log"] == "file:///log"


@pytest.mark.parametrize(
    "arguments",
    [
        ("checkpoint", "web", "--tcp", "maybe"),
        ("restore", "web", "--tcp", "maybe"),
        ("restore", "web", "--allow", "everything"),
        ("restore", "web", "--bridge", "a/b"),
        ("restore", "web", "--bridge", "much-too-long-a-name"),
        ("restore", "web", "--node", "nowhere"),
        ("checkpoint",),
        ("restore", "web", "extra"),
        ("bogus",),
        ("ls", "--bogus"),
        ("--namespace", "a b", "ls"),
    ],
)
def test_wrong_usage_ends_with_2(
    cedana: Cedana, calls: list[tuple[Any, ...]], arguments: tuple[str, ...]
) -> None:
    done = cedana(*arguments)
    assert done.code == 2
    assert done.err
    assert not done.out
    assert not calls


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CedanaError("x"), 1),
        (UsageError("x"), 2),
        (NotFoundError("x"), 3),
        (IncompatibleError("x"), 4),
        (StoreError("x"), 5),
        (CheckpointError("x"), 6),
        (KeyboardInterrupt(), 130),
        (RuntimeError("bug"), 1),
    ],
)
def test_every_kind_of_error_has_its_status(
    cedana: Cedana, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    monkeypatch.setattr(node, "ls", raising(error))
    done = cedana("ls")
    assert done.code == code
    assert "Traceback" not in done.err
    assert not done.out


def test_error_says_what_why_and_what_to_do(cedana: Cedana, monkeypatch: pytest.MonkeyPatch) -> None:
    error = CheckpointError("CRIU could not dump web", hint="close it", details="Error (x.c): y")
    monkeypatch.setattr(node, "checkpoint", raising(error))
    assert cedana("checkpoint", "web").err == (
        "cedana: CRIU could not dump web\n  cause: Error (x.c): y\n  try: close it\n"
    )


def test_missing_permission_is_said_in_words(cedana: Cedana, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "ls", raising(PermissionError(13, "Permission denied", "/run/cedana")))
    assert cedana("ls").err == "cedana: /run/cedana: Permission denied\n  try: run it as root\n"


def test_error_as_json_is_one_object_too(cedana: Cedana, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "inspect", raising(NotFoundError("no web", hint="look")))
    done = cedana("inspect", "web", "--json")
    assert done.code == 3
    assert done.json == {"error": {"message": "no web", "details": "", "hint": "look", "code": 3}}


def test_error_cannot_steer_the_terminal(cedana: Cedana, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "ls", raising(CedanaError("\x1b[2Jevil\r", details="\x07")))
    done = cedana("ls")
    assert "\x1b" not in done.err
    assert "\\x1b[2Jevil\\r" in done.err


def test_debug_shows_where_an_error_comes_from(cedana: Cedana, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "ls", raising(CedanaError("x")))
    assert "Traceback" in cedana("--debug", "ls").err


@pytest.mark.parametrize(("required", "code"), [(True, 4), (False, 0)])
def test_check_fails_only_for_what_every_move_needs(
    cedana: Cedana, monkeypatch: pytest.MonkeyPatch, required: bool, code: int
) -> None:
    features = [
        Feature("kernel", True, "6.1"),
        Feature("GPU", False, "none", "no GPU moves", "plug one in", required),
    ]
    monkeypatch.setattr(node, "check", lambda config: features)
    done = cedana("check")
    assert done.code == code
    assert "no   GPU     none\n       no GPU moves\n       plug one in" in done.out
    assert cedana("check", "--json").json["features"][1]["remedy"] == "plug one in"


def test_namespace_comes_from_option_then_environment(
    cedana: Cedana, calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONTAINERD_NAMESPACE", "moby")
    monkeypatch.setenv("CONTAINERD_ADDRESS", "unix:///run/x.sock")
    cedana("checkpoint", "web")
    cedana("-n", "k8s.io", "-a", "/run/y.sock", "checkpoint", "web")
    cedana("-n", "k8s.io", "checkpoint", "web", "-n", "other")
    configs = [call[4] for call in calls]
    assert [c.containerd_namespace for c in configs] == ["moby", "k8s.io", "other"]
    assert [str(c.containerd_address) for c in configs] == ["/run/x.sock", "/run/y.sock", "/run/x.sock"]


def test_other_node_runs_the_same_command(cedana: Cedana, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def execvp(program: str, arguments: list[str]) -> None:
        ran.append(arguments)
        raise SystemExit(0)

    monkeypatch.setattr(os, "execvp", execvp)
    cedana("restore", "reg.example/a:1", "--node", "b", "--name", "w 2", "--json")
    cedana("restore", "--node=b", "x")
    assert ran == [
        ["ssh", "root@b", "cedana", "restore", "reg.example/a:1", "--name", "'w 2'", "--json"],
        ["ssh", "root@b", "cedana", "restore", "x"],
    ]


def test_node_whose_command_is_missing_is_said_so(cedana: Cedana, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    done = cedana("restore", "x", "--node", "b")
    assert done.code == 1
    assert "node 'b'" in done.err


def test_version_is_the_packages(cedana: Cedana) -> None:
    assert cedana("--version").out == f"cedana {base.__version__}\n"


def test_help_lists_the_commands(cedana: Cedana) -> None:
    done = cedana("--help")
    assert done.code == 0
    for command in ("checkpoint", "restore", "push", "pull", "ls", "inspect", "rm", "check"):
        assert command in done.out


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys\nfrom cli import main\n"
        "try: main.run(['--help'])\nexcept SystemExit: pass\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    heavy = {"grpc", "google.protobuf", "rich", "urllib3", "zstandard", "pyroute2", "agent", "oci"}
    assert not heavy & set(done.stderr.split())


def test_wrong_usage_as_json_is_one_object_too(cedana: Cedana) -> None:
    done = cedana("inspect", "--json")
    assert done.json["error"]["code"] == 2
    assert done.json["error"]["hint"] == "cedana inspect --help"


def test_reader_that_has_gone_is_no_traceback(tmp_path: Path) -> None:
    script = "import sys; from cli import main; sys.exit(main.run(['check']))"
    done = subprocess.run(
        ["sh", "-c", f'"$0" -c "{script}" | true', sys.executable], capture_output=True, text=True
    )
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


def test_waterfall_of_nothing_is_empty() -> None:
    from cli.text import waterfall

    assert waterfall([]) == ""
    assert "failed" in waterfall([Step("dump", 0.0, 0.0, failed=True)])


def test_sizes_and_durations_read_well() -> None:
    from cli.text import duration, size

    assert [size(n) for n in (0, 1023, 1024, 5 << 30, 3 << 50)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "5.0 GiB",
        "3072.0 TiB",
    ]
    assert [duration(s) for s in (0, 0.0124, 61.5)] == ["0 ms", "12 ms", "61.50 s"]


def test_tree_of_processes_is_drawn_however_deep() -> None:
    from cli.text import tree

    children = {0: [1, 2], 1: [3]}
    assert tree([0], lambda n: children.get(n, []), str) == ["0", "├─ 1", "│  └─ 3", "└─ 2"]
    deep = tree([0], lambda n: [n + 1] if n < 5000 else [], str)
    assert len(deep) == 5001
