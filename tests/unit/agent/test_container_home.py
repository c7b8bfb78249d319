from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from agent.errors import AlreadyExistsError
from agent.home import Home, home
from base.config import Config

ID = "7" * 64


@pytest.fixture
def with_nerdctl(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A node with nerdctl, whose data root is not the usual one."""
    config.tools_dir.mkdir()
    (config.tools_dir / "nerdctl").touch(0o755)
    toml = tmp_path / "nerdctl.toml"
    toml.write_text(f'data_root = "{tmp_path}/nerdctl"\n')
    monkeypatch.setenv("NERDCTL_TOML", str(toml))
    return config


def made(config: Config, container_id: str = ID, name: str = "web") -> Home:
    own = home(config, "default", container_id, name)
    own.write("host-1", lambda owner: True)
    return own


def test_without_nerdctl_the_log_is_a_plain_file(config: Config) -> None:
    own = made(config, "c1", "c1")
    assert own.log_uri == f"file://{config.state_dir}/containers/default/c1/output.log"
    assert stat.S_IMODE(own.log.stat().st_mode) == 0o600
    assert "nerdctl/name" not in own.labels({}, "host-1", False)
    assert not (own.directory / "log-config.json").exists()


def test_with_nerdctl_everything_is_where_nerdctl_looks(with_nerdctl: Config, tmp_path: Path) -> None:
    own = made(with_nerdctl)
    [store] = (tmp_path / "nerdctl").iterdir()
    assert len(store.name) == 8
    assert own.directory == store / "containers" / "default" / ID
    assert own.hosts == store / "etchosts" / "default" / ID / "hosts"
    assert (store / "names" / "default" / "web").read_text() == ID
    log_config = json.loads((own.directory / "log-config.json").read_text())
    assert log_config == {"driver": "json-file", "address": str(with_nerdctl.containerd_address)}
    assert (own.directory / f"{ID}-json.log").exists()
    assert own.log_uri.startswith(f"binary://{with_nerdctl.tools_dir}/nerdctl?_NERDCTL_INTERNAL_LOGGING=%2F")


def test_labels_are_those_nerdctl_reads(with_nerdctl: Config) -> None:
    own = made(with_nerdctl)
    labels = own.labels({}, "host-1", host_network=False)
    assert labels["nerdctl/namespace"] == "default"
    assert labels["nerdctl/name"] == "web"
    assert labels["nerdctl/state-dir"] == str(own.directory)
    assert labels["nerdctl/log-uri"] == own.log_uri
    assert json.loads(labels["nerdctl/networks"]) == ["none"]
    assert json.loads(own.labels({}, "", host_network=True)["nerdctl/networks"]) == ["host"]
    assert json.loads(labels["nerdctl/log-config"])["driver"] == "json-file"


def test_only_the_users_labels_come_over(config: Config) -> None:
    claimed = {
        "team": "db",
        "org.opencontainers.image.title": "x",
        "nerdctl/state-dir": "/etc",
        "nerdctl/log-uri": "binary:///bin/sh",
        "containerd.io/restart.loguri": "binary:///bin/sh",
        "containerd.io/gc.root": "1",
        "io.cri-containerd.kind": "container",
        "io.containerd.image.config.stop-signal": "SIGQUIT",
        "ai.cedana.checkpointed": "x 1",
        "long": "x" * 5000,
    }
    assert made(config).labels(claimed, "", False) == {
        "team": "db",
        "org.opencontainers.image.title": "x",
        "io.containerd.image.config.stop-signal": "SIGQUIT",
    }


@pytest.mark.parametrize(
    ("claimed", "kept"), [("SIGRTMIN+3", "SIGRTMIN+3"), ("9", "9"), ("$(id)", "SIGTERM"), ("", "SIGTERM")]
)
def test_stop_signal_is_checked(config: Config, claimed: str, kept: str) -> None:
    name = "io.containerd.image.config.stop-signal"
    assert made(config).labels({name: claimed}, "", False)[name] == kept


@pytest.mark.parametrize(("claimed", "kept"), [("30", True), ("-1", False), ("x", False), ("9" * 40, False)])
def test_stop_timeout_is_checked(config: Config, claimed: str, kept: bool) -> None:
    labels = made(config).labels({"nerdctl/stop-timeout": claimed}, "", False)
    assert ("nerdctl/stop-timeout" in labels) is kept


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        ("always", True),
        ("unless-stopped", True),
        ("on-failure:3", True),
        ("no", False),
        ("x", False),
        ("", False),
    ],
)
def test_restart_policy_is_checked(config: Config, policy: str, kept: bool) -> None:
    labels = made(config).restart_labels({"containerd.io/restart.policy": policy})
    assert bool(labels) is kept


def test_files_can_be_read_in_the_container_and_the_log_only_by_root(with_nerdctl: Config) -> None:
    own = made(with_nerdctl)
    for path in own.files.values():
        assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert stat.S_IMODE((own.directory / f"{ID}-json.log").stat().st_mode) & 0o077 == 0
    assert stat.S_IMODE(own.directory.stat().st_mode) == 0o700


def test_hosts_file_knows_localhost_and_the_containers_own_name(config: Config) -> None:
    own = made(config)
    hosts = own.hosts.read_text()
    assert "127.0.0.1\tlocalhost" in hosts
    assert "host-1" in hosts
    assert own.files["/etc/hostname"].read_text() == "host-1\n"


def test_resolvers_only_this_node_can_reach_are_left_out(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolv = tmp_path / "resolv.conf"
    resolv.write_text("search x.org\nnameserver 127.0.0.53\nnameserver 10.0.0.2\n")
    monkeypatch.setattr("agent.home.RESOLV_CONF", (resolv,))
    assert made(config).files["/etc/resolv.conf"].read_text() == "search x.org\nnameserver 10.0.0.2\n"


def test_name_of_another_container_is_refused(with_nerdctl: Config) -> None:
    made(with_nerdctl)
    with pytest.raises(AlreadyExistsError, match="'web'"):
        made(with_nerdctl, "8" * 64)


def test_name_of_a_container_that_is_gone_is_taken_over(with_nerdctl: Config) -> None:
    made(with_nerdctl)
    own = home(with_nerdctl, "default", "8" * 64, "web")
    own.write("host-1", lambda owner: False)
    assert own.data_store is not None
    assert (own.data_store / "names" / "default" / "web").read_text() == "8" * 64


def test_removing_takes_everything_away_again(with_nerdctl: Config, tmp_path: Path) -> None:
    made(with_nerdctl).remove()
    assert [path for path in (tmp_path / "nerdctl").rglob("*") if path.is_file()] == []


def test_removing_spares_the_log_of_an_earlier_life(with_nerdctl: Config) -> None:
    first = made(with_nerdctl)
    log = first.directory / f"{ID}-json.log"
    log.write_text("1\n2\n")
    second = home(with_nerdctl, "default", ID, "web")
    second.write("host-1", lambda owner: True)
    second.remove()
    assert log.read_text() == "1\n2\n"


def test_name_is_taken_under_nerdctls_lock(with_nerdctl: Config) -> None:
    own = home(with_nerdctl, "default", ID, "web")
    assert own.data_store is not None
    names = own.data_store / "names" / "default"
    names.mkdir(parents=True)
    script = (
        "import fcntl,os,sys,time; fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX); print(); "
        "sys.stdout.flush(); time.sleep(0.5)"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(names)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        own.write("host-1", lambda owner: True)
        assert holder.wait() == 0
    assert (names / "web").read_text() == ID
