"""What one restored container has on disk outside containerd: its log, and its /etc/hosts and the like.

With nerdctl on the node everything is where nerdctl itself would have put it (nerdctl, docs/dir.md), with
nerdctl's labels, so that `nerdctl ps`, `logs`, `exec`, `stop` and `rm` treat the container as their own.
Without it the same files are below `state_dir/containers`, and the log is a plain file.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from agent.errors import AlreadyExistsError
from base.config import Config
from base.errors import UsageError
from runtime.node import arch

_DATA_ROOT = "/var/lib/nerdctl"
_TOML = "/etc/nerdctl/nerdctl.toml"
OUTPUT_LOG = "output.log"
RESOLV_CONF = (Path("/etc/resolv.conf"), Path("/run/systemd/resolve/resolv.conf"))
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,75}")
_STOP_SIGNAL_LABEL = "io.containerd.image.config.stop-signal"
_STOP_SIGNAL = re.compile(r"(SIG)?[A-Z0-9+-]{1,12}|\d{1,2}")
_RESTART_POLICY = re.compile(r"no|always|unless-stopped|on-failure(:\d{1,6})?")
_OTHERS_LABELS = ("nerdctl/", "containerd.io/", "io.containerd.", "io.cri-containerd.", "ai.cedana.")
"""Labels that make containerd, nerdctl, the CRI plugin or us act; an artifact's are not taken over."""
_MAX_LABEL_BYTES = 4096
_MAX_LABELS = 256


@dataclass(frozen=True)
class Home:
    directory: Path
    hosts: Path
    log_uri: str
    """Where the shim sends stdout and stderr (containerd's logging URI)."""
    data_store: Path | None
    """nerdctl's directory for this containerd; None when nerdctl is not installed."""
    address: Path
    """containerd's socket, as nerdctl's logger must reach it."""
    namespace: str
    container_id: str
    name: str
    is_new: bool
    """False when an earlier life of the container left it here, with its log."""

    @property
    def files(self) -> dict[str, Path]:
        """This container's own files by the place they are mounted on."""
        return {
            "/etc/hosts": self.hosts,
            "/etc/hostname": self.directory / "hostname",
            "/etc/resolv.conf": self.directory / "resolv.conf",
        }

    @property
    def log(self) -> Path:
        """The file the log ends up in."""
        return self.directory / (OUTPUT_LOG if self.data_store is None else f"{self.container_id}-json.log")

    def write(self, hostname: str, exists: Callable[[str], bool]) -> None:
        """Make everything; raises `AlreadyExistsError` if nerdctl gave the name to another that `exists`."""
        if self.data_store is not None:
            self._claim_name(self.data_store, exists)
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.hosts.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        own_name = f"127.0.1.1\t{hostname}\n" if hostname else ""
        localhost = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"
        _write(self.hosts, localhost + own_name)
        _write(self.files["/etc/hostname"], f"{hostname}\n")
        _write(self.files["/etc/resolv.conf"], _resolvers())
        self.log.touch(0o600)
        if self.data_store is not None:
            _write(self.directory / "log-config.json", self._log_config, 0o600)
            _write(self.hosts.parent / "meta.json", self._hosts_meta(hostname), 0o600)

    def remove(self) -> None:
        """Undo `write`, except for what an earlier life of the container had left."""
        if not self.is_new:
            return
        if self.data_store is not None:
            self._release_name(self.data_store)
            shutil.rmtree(self.hosts.parent, ignore_errors=True)
        shutil.rmtree(self.directory, ignore_errors=True)

    def labels(self, claimed: Mapping[str, str], hostname: str, host_network: bool) -> dict[str, str]:
        """The container's labels: the user's own from the artifact, everything else made here."""
        kept = {
            key: value
            for key, value in list(claimed.items())[:_MAX_LABELS]
            if not key.startswith(_OTHERS_LABELS)
            and len(key.encode()) + len(value.encode()) <= _MAX_LABEL_BYTES
        }
        signal = claimed.get(_STOP_SIGNAL_LABEL, "")
        kept[_STOP_SIGNAL_LABEL] = signal if _STOP_SIGNAL.fullmatch(signal) else "SIGTERM"
        timeout = claimed.get("nerdctl/stop-timeout", "")
        if timeout.isascii() and timeout.isdigit() and len(timeout) < 10:
            kept["nerdctl/stop-timeout"] = timeout
        if self.data_store is None:
            return kept
        return kept | {
            "nerdctl/namespace": self.namespace,
            "nerdctl/name": self.name,
            "nerdctl/hostname": hostname,
            "nerdctl/state-dir": str(self.directory),
            **self.annotations(host_network),
            "nerdctl/platform": f"linux/{arch()}",
            "nerdctl/extraHosts": "[]",
            "nerdctl/host-config": "{}",
            "nerdctl/dns": "{}",
            "nerdctl/log-uri": self.log_uri,
            "nerdctl/log-config": self._log_config,
        }

    def annotations(self, host_network: bool) -> dict[str, str]:
        """What `nerdctl rm` reads of the container's spec: no CNI network of nerdctl's is to be undone."""
        networks = {"nerdctl/networks": '["host"]' if host_network else '["none"]'}
        return networks if self.data_store is not None else {}

    def restart_labels(self, claimed: Mapping[str, str]) -> dict[str, str]:
        """The restart policy the container had. Only once it runs: containerd acts on these at once."""
        policy = claimed.get("containerd.io/restart.policy", "")
        if not _RESTART_POLICY.fullmatch(policy) or policy == "no":
            return {}
        return {
            "containerd.io/restart.policy": policy,
            "containerd.io/restart.status": "running",
            "containerd.io/restart.loguri": self.log_uri,
            "containerd.io/restart.explicitly-stopped": "false",
        }

    @property
    def _log_config(self) -> str:
        return json.dumps({"driver": "json-file", "address": str(self.address)})

    def _hosts_meta(self, hostname: str) -> str:
        """What nerdctl keeps beside the hosts file; `nerdctl rm` and `rename` read it."""
        networks: dict[str, object] = {"Networks": None, "ExtraHosts": {}, "Domainname": ""}
        return json.dumps({"ID": self.container_id, "Hostname": hostname, "Name": self.name, **networks})

    def _claim_name(self, data_store: Path, exists: Callable[[str], bool]) -> None:
        with _names(data_store, self.namespace) as directory:
            entry = directory / self.name
            owner = entry.read_text() if entry.exists() else ""
            taken = _ID.fullmatch(owner) and owner != self.container_id
            if taken and exists(owner):  # `ctr containers rm` leaves nerdctl's entry behind
                raise AlreadyExistsError(
                    f"nerdctl has a container named {self.name!r} already",
                    hint=f"remove it (nerdctl rm {self.name}), or give another name: --name",
                    details=f"container {owner[:64]}",
                )
            _write(entry, self.container_id, 0o600)

    def _release_name(self, data_store: Path) -> None:
        with _names(data_store, self.namespace) as directory, suppress(FileNotFoundError):
            if (directory / self.name).read_text() == self.container_id:
                (directory / self.name).unlink()


def home(config: Config, namespace: str, container_id: str, name: str) -> Home:
    """Where the container's files belong on this node; nothing is made yet."""
    nerdctl = config.tool("nerdctl")
    data_store = None
    if os.path.isabs(nerdctl):
        data_store = _data_store(config.containerd_address)
        directory = data_store / "containers" / namespace / container_id
        hosts = data_store / "etchosts" / namespace / container_id / "hosts"
        log_uri = f"binary://{quote(nerdctl)}?_NERDCTL_INTERNAL_LOGGING={quote(str(data_store), safe='')}"
    else:
        directory = config.state_dir / "containers" / namespace / container_id
        hosts = directory / "hosts"
        log_uri = f"file://{quote(str(directory / OUTPUT_LOG))}"
    return Home(
        directory=directory,
        hosts=hosts,
        log_uri=log_uri,
        data_store=data_store,
        address=config.containerd_address,
        namespace=namespace,
        container_id=container_id,
        name=name,
        is_new=not directory.exists(),
    )


def _data_store(address: Path) -> Path:
    """nerdctl's directory for the containerd at `address`: `<data root>/<hash of the socket's path>`."""
    path = Path(os.environ.get("NERDCTL_TOML", _TOML))
    try:
        root = tomllib.loads(path.read_text()).get("data_root", _DATA_ROOT)
    except FileNotFoundError:
        root = _DATA_ROOT
    except (OSError, ValueError) as error:
        raise UsageError(f"nerdctl's configuration {path} cannot be read", details=str(error)) from error
    return Path(str(root)) / hashlib.sha256(os.path.realpath(address).encode()).hexdigest()[:8]


@contextmanager
def _names(data_store: Path, namespace: str) -> Iterator[Path]:
    """nerdctl's directory of names, locked as nerdctl locks it."""
    directory = data_store / "names" / namespace
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield directory
    finally:
        os.close(lock)


def _resolvers() -> str:
    """This node's /etc/resolv.conf without the resolvers that only the node itself can reach."""
    for path in RESOLV_CONF:
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        kept = [line for line in lines if not re.match(r"\s*nameserver\s+(127\.|::1)", line)]
        if any(line.strip().startswith("nameserver") for line in kept):
            return "\n".join(kept) + "\n"
    return ""


def _write(path: Path, text: str, mode: int = 0o644) -> None:
    """Write `path` in place: it may be mounted in a container that is being replaced."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w") as file:
        os.fchmod(file.fileno(), mode)
        file.write(text)
