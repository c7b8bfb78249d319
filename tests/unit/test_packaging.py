"""What puts Cedana and its tools on a machine: where packages come from, which programs will do."""

from __future__ import annotations

import configparser
import importlib.util
import posix
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

from shim import launch

ROOT = Path(__file__).resolve().parents[2]


def load(path: str) -> ModuleType:
    """The module in the file `path` of the repository, which is on nobody's import path."""
    file = ROOT / path
    loader = SourceFileLoader(f"packaging_{file.stem}", str(file))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module
    loader.exec_module(module)
    return module


sys.path.insert(0, str(ROOT / "packaging/node"))
install = load("packaging/node/install")
debian = sys.modules["debian"]
sys.path.remove(str(ROOT / "packaging/node"))
shim_launcher = load("packaging/shim_launcher.py")
skips = load(".ci/skips.py")


@pytest.fixture
def etc(tmp_path: Path) -> Path:
    (tmp_path / "etc/sources.list.d").mkdir(parents=True)
    return tmp_path / "etc"


def _program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


# Where packages come from


def test_mirror_is_the_machine_s_own(etc: Path) -> None:
    (etc / "sources.list.d/debian.sources").write_text(
        "# as delivered\nTypes: deb deb-src\nURIs: http://mirror.test/debian\n"
        "Suites: trixie\n trixie-updates\nComponents: main\n"
        "Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n\n"
        "Types: deb\nURIs: http://mirror.test/debian-security\nSuites: trixie-security\nComponents: main\n"
    )
    assert debian.mirror(etc) == "http://mirror.test/debian"


def test_mirror_is_found_in_one_line_sources(etc: Path) -> None:
    (etc / "sources.list").write_text(
        "deb cdrom:[Debian GNU/Linux 12]/ bookworm main\n# deb http://old.test/debian bookworm main\n"
        "deb [arch=amd64 trusted=yes] http://security.test/debian-security bookworm-security main\n"
        "deb [arch=amd64] https://mirror.test/debian/ bookworm main non-free-firmware\n"
    )
    assert debian.mirror(etc) == "https://mirror.test/debian/"


def test_disabled_and_foreign_archives_are_passed_over(etc: Path) -> None:
    (etc / "sources.list.d/a.sources").write_text(
        "Enabled: no\nTypes: deb\nURIs: http://disabled.test/debian\nSuites: trixie\nComponents: main\n"
    )
    (etc / "sources.list.d/b.list").write_text("deb https://packages.test/linux/debian bookworm stable\n")
    (etc / "sources.list.d/c.list.disabled").write_text("deb http://disabled.test/debian bookworm main\n")
    (etc / "sources.list.d/d.list").write_text("deb http://proxy.test/deb12-remote bookworm main\n")
    assert debian.mirror(etc) == "http://proxy.test/deb12-remote"


def test_archive_named_debian_goes_before_another(etc: Path) -> None:
    (etc / "sources.list.d/a.list").write_text("deb https://vendor.test/apt bookworm main\n")
    (etc / "sources.list.d/b.list").write_text("deb http://mirror.test/debian bookworm main\n")
    assert debian.mirror(etc) == "http://mirror.test/debian"


def test_machine_without_an_archive_is_told_so(etc: Path) -> None:
    with pytest.raises(debian.InstallError, match="names no Debian archive"):
        debian.mirror(etc)


def test_unsigned_archive_is_refused_though_the_machine_trusts_it(etc: Path, tmp_path: Path) -> None:
    archive = tmp_path / "mirror/debian"
    for architecture in ("amd64", "arm64"):
        (archive / f"dists/sid/main/binary-{architecture}").mkdir(parents=True)
        (archive / f"dists/sid/main/binary-{architecture}/Packages").touch()
    (archive / "dists/sid/Release").write_text("Suite: sid\nCodename: sid\nComponents: main\n")
    (etc / "sources.list").write_text(f"deb [trusted=yes] file:{archive} trixie main\n")
    suite = debian.Suite("sid", tmp_path / "work", etc)
    with pytest.raises(debian.InstallError, match=r"not signed|is no longer signed"):
        suite.download(["criu"], tmp_path / "debs")
    assert not list(tmp_path.glob("debs/*.deb"))


# Which programs are good enough


def test_system_program_that_is_new_enough_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "SYSTEM_PATH", str(tmp_path))
    runc = _program(tmp_path / "runc", "echo runc version 1.1.15+ds1")
    tool = install.Tool("runc", ("runc",), (1, 1, 15))
    assert install._system_tool(tool) == {"runc": str(runc)}


@pytest.mark.parametrize("said", ["echo runc version 1.1.5", "echo no idea", "exit 127", "echo runc 2.0.0"])
def test_system_program_that_will_not_do_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    monkeypatch.setattr(install, "SYSTEM_PATH", str(tmp_path))
    _program(tmp_path / "runc", said)
    assert install._system_tool(install.Tool("runc", ("runc",), (1, 1, 15), (2,))) is None


def test_tool_is_used_only_with_all_of_its_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "SYSTEM_PATH", str(tmp_path))
    _program(tmp_path / "containerd", "echo containerd 2.1.9")
    assert install._system_tool(install.Tool("containerd", ("containerd", "ctr"), (2,))) is None


def test_criu_that_passes_its_own_check_but_dumps_no_socket_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "SYSTEM_PATH", str(tmp_path))
    criu = _program(
        tmp_path / "criu",
        'case $1 in --version) echo "Version: 4.2";; check) echo Looks good.;;'
        ' *) echo "Error (criu/sk-inet.c:1): no" >&2; exit 1;; esac',
    )
    tool = install.Tool("criu", ("criu",), (4, 2))
    assert "sk-inet" in install._unfit(tool, criu)
    assert install._system_tool(tool) is None


def test_failed_installation_leaves_the_previous_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "PREFIX", tmp_path)
    monkeypatch.setattr(install, "_install_system_packages", lambda: None)
    _program(tmp_path / "node-000000000000/bin/runc", "echo the old one")
    (tmp_path / "node").symlink_to("node-000000000000")

    def fail(line: object, place: Path) -> dict[str, str]:
        _program(place / "bin/runc", "echo the new one")
        raise install.InstallError("the mirror is down")

    monkeypatch.setattr(install, "_fill", fail)
    with pytest.raises(install.InstallError, match="the mirror is down"):
        install.install(install.CURRENT)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["node", "node-000000000000"]
    assert "the old one" in (tmp_path / "node/bin/runc").read_text()


def test_new_installation_replaces_the_previous_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "PREFIX", tmp_path)
    monkeypatch.setattr(install, "_install_system_packages", lambda: None)
    filled: list[Path] = []

    def fill(line: object, place: Path) -> dict[str, str]:
        filled.append(place)
        _program(place / "bin/runc", "echo the new one")
        return {"runc": "9"}

    monkeypatch.setattr(install, "_fill", fill)
    _program(tmp_path / "node-000000000000/bin/runc", "echo the old one")
    (tmp_path / "node").symlink_to("node-000000000000")
    install.install(install.CURRENT)
    install.install(install.CURRENT)
    assert len(filled) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["node", filled[0].name]
    (tmp_path / "node/bin/runc").unlink()
    (tmp_path / "node/bin/runc").symlink_to("/nowhere")
    install.install(install.CURRENT)
    assert len(filled) == 2


def test_installation_depends_on_its_sources_and_on_nothing_left_beside_them() -> None:
    sources = {path.name for path in (ROOT / "packaging/node").iterdir() if path.suffix in (".py", ".txt")}
    assert sources == set(install.KEY_FILES)
    key = install._key(install.CURRENT)
    stray = ROOT / "packaging/node/.stray"
    stray.touch()
    try:
        assert install._key(install.CURRENT) == key
    finally:
        stray.unlink()
    assert install._key(install.CONTAINERD_1_7) != key


def test_folder_of_somebody_else_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "node").mkdir()
    with pytest.raises(install.InstallError, match="move it away"):
        install._point(tmp_path / "node", tmp_path / "node-000000000000")


# The shim's launcher


def test_launcher_names_this_environment() -> None:
    lines = shim_launcher.launcher().splitlines()
    assert lines[0] == f"#!{sys.executable} -IS"
    assert str(ROOT) in lines[3]


def test_launcher_that_the_kernel_could_not_start_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/" + "x" * 255)
    with pytest.raises(SystemExit, match="too long"):
        shim_launcher.launcher()


# The units of systemd


def _unit(name: str) -> configparser.ConfigParser:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string((ROOT / "packaging/systemd" / name).read_text())
    return unit


def test_the_socket_is_where_the_shim_looks_for_the_zygote(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(posix.environ, b"CEDANA_RUN_DIR", raising=False)
    section = _unit("cedana-zygote.socket")["Socket"]
    assert section["ListenSequentialPacket"].encode() == launch.socket_path()
    assert section["SocketMode"] == "0600"


def test_shims_outlive_the_service_that_forked_them() -> None:
    assert _unit("cedana-zygote.service")["Service"]["KillMode"] == "process"


# The rule on skipped tests


@pytest.fixture
def results(tmp_path: Path) -> Path:
    (tmp_path / "results.xml").write_text(
        '<testsuites><testsuite><testcase classname="tests.node.test_x" name="test_runs"/>'
        '<testcase classname="tests.node.test_x" name="test_gpu[one]"><skipped message="no GPU"/></testcase>'
        "</testsuite></testsuites>"
    )
    return tmp_path / "results.xml"


def test_skipped_test_that_is_not_listed_fails(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "README.md").write_text("- `tests/node/test_x.py::test_other`: needs a tape drive\n")
    assert skips.main(results, tmp_path / "README.md") == 1
    assert "tests/node/test_x.py::test_gpu was skipped (no GPU)" in capsys.readouterr().err


def test_skipped_test_that_is_listed_with_a_reason_passes(results: Path, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("- `tests/node/test_x.py::test_gpu`: needs a GPU\n")
    assert skips.main(results, tmp_path / "README.md") == 0


def test_reason_may_not_be_empty(results: Path, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("- `tests/node/test_x.py::test_gpu`: \n")
    assert skips.main(results, tmp_path / "README.md") == 1


def test_run_of_no_test_fails(tmp_path: Path) -> None:
    (tmp_path / "results.xml").write_text("<testsuites><testsuite/></testsuites>")
    (tmp_path / "README.md").touch()
    assert skips.main(tmp_path / "results.xml", tmp_path / "README.md") == 1
