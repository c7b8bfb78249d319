"""`cedana check`: every "no" says what it costs and what to do about it."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from base.config import Config
from runtime import criu_trial, features
from runtime.features import Feature, Roots

_CRIU = """#!/bin/sh
case "$*" in
--version) echo 'Version: {version}';;
check) echo "{check}"; exit {status};;
"check --feature"*) exit {feature};;
esac
"""


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tools folder with a good stand-in of every program, and nothing else on PATH but the system's."""
    folder = tmp_path / "tools"
    folder.mkdir()
    monkeypatch.setenv("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
    monkeypatch.setattr(criu_trial, "failure", lambda criu: "")
    _program(folder, "criu", _CRIU.format(version="4.2.1", check="Looks good.", status=0, feature=0))
    _program(folder, "runc", "#!/bin/sh\necho runc version 1.3.6+ds1\n")
    _program(folder, "containerd", "#!/bin/sh\necho containerd github.com/containerd/containerd/v2 2.1.9\n")
    return folder


@pytest.fixture
def config(tools: Path, tmp_path: Path) -> Config:
    return Config(tools_dir=tools, containerd_address=tmp_path / "containerd.sock")


def _program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)


def _check(config: Config, roots: Roots | None = None) -> dict[str, Feature]:
    return {feature.name: feature for feature in features.check(config, roots)}


def _nvidia(proc: Path, driver: str, models: tuple[str, ...]) -> None:
    folder = proc / "driver/nvidia"
    folder.mkdir(parents=True)
    (folder / "version").write_text(
        f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {driver}  Release Build  (dvs-builder)\n"
        "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n"
    )
    for number, model in enumerate(models):
        gpu = folder / f"gpus/0000:0{number}:00.0"
        gpu.mkdir(parents=True)
        (gpu / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 16\n")


def test_every_no_has_a_consequence_and_a_remedy_and_no_yes_has(config: Config, tmp_path: Path) -> None:
    nothing = Roots(proc=tmp_path / "proc", sys=tmp_path / "sys", modules=tmp_path / "modules")
    without_tools = replace(config, tools_dir=tmp_path)
    for feature in [*features.check(config), *features.check(without_tools, nothing)]:
        assert bool(feature.consequence) is not feature.ok, feature
        assert bool(feature.remedy) is not feature.ok, feature
        assert feature.value, feature


def test_features_come_in_a_fixed_order(config: Config) -> None:
    assert [feature.name for feature in features.check(config)] == [
        "kernel", "CRIU", "runc", "containerd", "cgroups", "freezer", "overlayfs", "FUSE", "nftables",
        "socket tools", "userfaultfd", "lazy pages", "CUDA driver", "GPU",
    ]  # fmt: skip


def test_old_kernel_is_a_no(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.release", lambda: "5.4.0-26-generic")
    kernel = _check(config)["kernel"]
    assert not kernel.ok
    assert "5.13" in kernel.remedy


def test_foreign_architecture_is_a_no(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    kernel = _check(config)["kernel"]
    assert not kernel.ok
    assert "x86_64" in kernel.remedy


def test_missing_criu_is_a_no_that_names_the_installer(config: Config, tools: Path) -> None:
    (tools / "criu").unlink()
    found = _check(config)
    assert not found["CRIU"].ok
    assert found["CRIU"].remedy == features.INSTALL
    assert found["lazy pages"].value == "unknown: CRIU is not installed"


def test_criu_that_is_too_old_is_a_no(config: Config, tools: Path) -> None:
    _program(tools, "criu", _CRIU.format(version="4.1.1", check="Looks good.", status=0, feature=0))
    found = _check(config)["CRIU"]
    assert not found.ok
    assert "4.1 is too old" in found.value


def test_criu_check_that_fails_is_quoted(config: Config, tools: Path) -> None:
    _program(tools, "criu", _CRIU.format(version="4.2.1", check="Does not look good.", status=1, feature=0))
    found = _check(config)["CRIU"]
    assert not found.ok
    assert "Does not look good." in found.value


def test_criu_that_passes_its_own_check_but_not_the_trial_is_a_no(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(criu_trial, "failure", lambda criu: "criu dump: Can't get 1:16 opt")
    found = _check(config)["CRIU"]
    assert not found.ok
    assert "Can't get 1:16 opt" in found.value


def test_trial_quotes_the_criu_that_fails(tmp_path: Path) -> None:
    _program(tmp_path, "criu", "#!/bin/sh\necho 'Error (criu/sockets.c:1): out of luck' >&2\nexit 1\n")
    assert criu_trial.failure(str(tmp_path / "criu")).endswith("out of luck")


def test_trial_passes_with_the_node_s_criu() -> None:
    assert criu_trial.failure(Config().tool("criu")) == ""


def test_kernel_features_criu_lacks_are_not_required(config: Config, tools: Path) -> None:
    _program(tools, "criu", _CRIU.format(version="4.2.1", check="Looks good.", status=0, feature=1))
    found = _check(config)
    for name in ("nftables", "userfaultfd", "lazy pages"):
        assert not found[name].ok
        assert not found[name].required
    assert found["CRIU"].ok


@pytest.mark.parametrize(
    ("name", "printed"), [("runc", "runc version 1.1.5"), ("containerd", "containerd 1.6.20")]
)
def test_program_that_is_too_old_is_a_no(config: Config, tools: Path, name: str, printed: str) -> None:
    _program(tools, name, f"#!/bin/sh\necho {printed}\n")
    found = _check(config)[name]
    assert not found.ok
    assert "is too old" in found.value


def test_containerd_that_does_not_answer_is_a_no_with_its_socket(config: Config) -> None:
    found = _check(config)["containerd"]
    assert not found.ok
    assert str(config.containerd_address) in found.value
    assert "containerd_address" in found.remedy


def test_containerd_that_answers_is_a_yes(config: Config) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(config.containerd_address))
        listener.listen()
        assert _check(config)["containerd"].ok


def test_unified_hierarchy_is_v2_and_can_freeze(config: Config, tmp_path: Path) -> None:
    root = tmp_path / "sys/fs/cgroup"
    (root / "system.slice").mkdir(parents=True)
    (root / "cgroup.controllers").touch()
    (root / "system.slice/cgroup.freeze").touch()
    found = _check(config, Roots(sys=tmp_path / "sys"))
    assert found["cgroups"].value == "v2"
    assert found["freezer"].ok


def test_hybrid_hierarchy_is_v1(config: Config, tmp_path: Path) -> None:
    for name in ("memory", "freezer", "unified"):
        (tmp_path / "sys/fs/cgroup" / name).mkdir(parents=True)
    found = _check(config, Roots(sys=tmp_path / "sys"))
    assert found["cgroups"].value == "v1"
    assert found["freezer"].ok


@pytest.mark.parametrize(
    ("name", "module"),
    [("overlayfs", "kernel/fs/overlayfs/overlay.ko.xz"), ("FUSE", "kernel/fs/fuse/fuse.ko.zst")],
)
def test_file_system_may_be_a_module_not_loaded_yet(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str
) -> None:
    monkeypatch.setattr("platform.release", lambda: "6.1.0")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/filesystems").write_text("nodev\tproc\n\text4\n")
    roots = Roots(proc=tmp_path / "proc", modules=tmp_path / "modules")
    assert not _check(config, roots)[name].ok
    (tmp_path / "modules/6.1.0").mkdir(parents=True)
    (tmp_path / "modules/6.1.0/modules.dep").write_text(f"{module}:\n")
    assert _check(config, roots)[name].ok


def test_gpus_are_counted_by_model(config: Config, tmp_path: Path) -> None:
    _nvidia(tmp_path / "proc", "580.159.03", ("NVIDIA H200", "NVIDIA H200", "NVIDIA L4"))
    found = _check(config, Roots(proc=tmp_path / "proc"))
    assert found["CUDA driver"].ok
    assert found["CUDA driver"].value == "580.159.03"
    assert found["GPU"].value == "2 x NVIDIA H200, 1 x NVIDIA L4"


def test_driver_without_the_checkpoint_api_is_a_no(config: Config, tmp_path: Path) -> None:
    _nvidia(tmp_path / "proc", "535.183.01", ("NVIDIA T4",))
    driver = _check(config, Roots(proc=tmp_path / "proc"))["CUDA driver"]
    assert not driver.ok
    assert "570" in driver.remedy


def test_missing_socket_tools_are_a_no(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None if name == "ss" else f"/usr/bin/{name}")
    found = _check(config)["socket tools"]
    assert not found.ok
    assert found.value == "ss not installed"


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("1.7.24~ds1", (1, 7, 24)), ("6.18.44-fc", (6, 18, 44)), ("4", (4,)), ("v2", ()), ("", ())],
)
def test_version_is_the_leading_numbers(text: str, numbers: tuple[int, ...]) -> None:
    assert features.version(text) == numbers
