"""Container images of real programs, built from Debian packages: one layer of base packages, one of the
program's own, one of files of ours. No daemon and no root file system is needed, and no network at run time.

    python -m tests.node.images [NAME…]      build (all by default) and print where the archives are

Packages come through packaging/node/install, of the same Debian release on every machine. Everything is
kept under .cache/images, keyed by what it is made of.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "images"
WORKLOADS = Path(__file__).with_name("workloads")
FORMAT = 2
"""Raised when the way layers are made changes."""

_BASE_PACKAGES = ("dash", "coreutils", "libc-bin", "sed", "grep", "mawk", "bash")
_UNWANTED = ("libllvm*", "libz3*", "perl*", "libperl*", "debconf*", "ucf", "sensible-utils", "dpkg",
             "tar", "openssl", "ssl-cert", "adduser", "passwd", "lsb-*", "sysvinit-utils", "systemd*",
             "init-system-helpers", "iproute2", "logrotate", "cron*", "media-types", "netbase", "tzdata",
             "util-linux*", "login*", "locales", "procps")  # fmt: skip
"""Packages that programs depend on only for maintainer scripts, or for what no workload uses."""
_UNWANTED_PATHS = ("usr/share/doc/", "usr/share/man/", "usr/share/locale/", "usr/share/info/",
                   "usr/share/lintian/", "usr/share/doc-base/")  # fmt: skip
_USERS = (("root", 0, "/root"), ("www-data", 33, "/var/www"), ("redis", 101, "/var/lib/redis"),
          ("postgres", 102, "/var/lib/postgresql"), ("nobody", 65534, "/nonexistent"))  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    packages: tuple[str, ...]
    command: tuple[str, ...]
    directories: Mapping[str, int] = field(default_factory=dict)
    """Path -> owner (uid and gid)."""
    files: Mapping[str, bytes] = field(default_factory=dict)


_POSTGRES_START = b"""#!/bin/sh
set -e
PATH=$(echo /usr/lib/postgresql/*/bin):$PATH
initdb --no-sync --auth=trust --username=postgres --locale=C >/dev/null
echo "host all all all trust" >>"$PGDATA/pg_hba.conf"
exec postgres -c listen_addresses='*' -c unix_socket_directories=/tmp
"""

_NGINX_CONFIG = b"""daemon off;
user www-data;
worker_processes 2;
error_log /dev/stderr notice;
pid /run/nginx.pid;
events { worker_connections 64; }
http {
    access_log off;
    default_type application/octet-stream;
    keepalive_requests 1000000;
    keepalive_timeout 600s;
    send_timeout 600s;
    sendfile on;
    server {
        listen 80;
        root /srv;
        location /slow/ { alias /srv/; limit_rate 1m; }
    }
}
"""

RECIPES: Mapping[str, Recipe] = {
    "base": Recipe((), ("/bin/sh",)),
    "redis": Recipe(
        ("redis-server",),
        ("redis-server", "--bind", "0.0.0.0", "--protected-mode", "no", "--dir", "/var/lib/redis"),
        {"var/lib/redis": 101},
    ),
    "postgres": Recipe(
        ("postgresql",),
        ("/usr/local/bin/start-postgres",),
        {"var/lib/postgresql": 102, "var/lib/postgresql/data": 102, "run/postgresql": 102},
        {"usr/local/bin/start-postgres": _POSTGRES_START},
    ),
    "nginx": Recipe(
        ("nginx",),
        ("nginx", "-c", "/etc/nginx/bed.conf"),
        {"srv": 0, "var/log/nginx": 0, "var/lib/nginx": 33, "run": 0},
        {"etc/nginx/bed.conf": _NGINX_CONFIG},
    ),
    "python": Recipe(("python3",), ("/usr/bin/python3",)),
}


def build(name: str) -> Path:
    """The OCI archive (a tar of an image layout) of the image `name`; built if it is not in the cache."""
    recipe = RECIPES[name]
    layers = [_base_layer()]
    if recipe.packages:
        layers.append(_package_layer(recipe.packages, without=_BASE_PACKAGES))
    layers.append(_files_layer(name, recipe))
    config = json.dumps(_image_config(recipe, [_digest(layer) for layer in layers])).encode()
    key = _key(config)
    return _cached(f"{name}-{key}.tar", lambda out: _write_archive(out, layers, config))


def cni_plugins() -> Path:
    """The directory of the CNI plugins, from Debian's package: installed, or else unpacked here."""
    installed = Path("/usr/lib/cni")
    if (installed / "bridge").exists():
        return installed
    directory = CACHE / f"cni-{platform.machine()}"
    if not directory.exists():
        with tempfile.TemporaryDirectory(dir=_cache()) as scratch:
            root = Path(scratch) / "root"
            package = _download(["containernetworking-plugins"])["containernetworking-plugins"]
            subprocess.run(["dpkg-deb", "--extract", package, root], check=True)
            _rename(root, directory)
    return directory / "usr" / "lib" / "cni"


def _base_layer() -> Path:
    def write(out: IO[bytes]) -> None:
        with _Layer(out) as layer:
            for link in ("bin", "sbin", "lib", "lib64"):
                layer.directory(f"usr/{link}")
                layer.symlink(link, f"usr/{link}")
            layer.directory("tmp", mode=0o1777)
            for directory in ("root", "run", "dev", "proc", "sys", "var/tmp", "etc"):
                layer.directory(directory)
            layer.file("etc/passwd", "".join(f"{n}:x:{i}:{i}::{h}:/bin/sh\n" for n, i, h in _USERS).encode())
            layer.file("etc/group", "".join(f"{n}:x:{i}:\n" for n, i, _ in _USERS).encode())
            layer.file("etc/nsswitch.conf", b"passwd: files\ngroup: files\nhosts: files dns\n")
            layer.packages(_download(_BASE_PACKAGES).values())

    return _cached(f"layer-{_key('base', _BASE_PACKAGES)}.tar", write)


def _package_layer(packages: tuple[str, ...], without: tuple[str, ...]) -> Path:
    def write(out: IO[bytes]) -> None:
        with _Layer(out) as layer:
            there = _download(without)
            layer.packages(path for name, path in _download(packages).items() if name not in there)

    return _cached(f"layer-{_key(*packages)}.tar", write)


def _files_layer(name: str, recipe: Recipe) -> Path:
    files = {**recipe.files, **(_workloads() if name == "python" else {})}
    key = _key(
        name, recipe.directories.items(), sorted((p, hashlib.sha256(b).hexdigest()) for p, b in files.items())
    )

    def write(out: IO[bytes]) -> None:
        with _Layer(out) as layer:
            for path, owner in recipe.directories.items():
                layer.directory(path, mode=0o755 if owner == 0 else 0o700, owner=owner)
            for path, body in files.items():
                layer.file(path, body, mode=0o755)

    return _cached(f"layer-{key}.tar", write)


def _workloads() -> dict[str, bytes]:
    return {f"workloads/{path.name}": path.read_bytes() for path in sorted(WORKLOADS.glob("*.py"))}


class _Layer:
    """An uncompressed layer tar; the first entry of a path wins."""

    def __init__(self, out: IO[bytes]) -> None:
        self._tar = tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT)  # noqa: SIM115
        self._seen: set[str] = set()

    def __enter__(self) -> _Layer:
        return self

    def __exit__(self, *_: object) -> None:
        self._tar.close()

    def directory(self, path: str, mode: int = 0o755, owner: int = 0) -> None:
        parent = os.path.dirname(path)
        if parent and parent not in self._seen:
            self.directory(parent)
        self._add(_entry(path, tarfile.DIRTYPE, mode, owner))

    def symlink(self, path: str, target: str) -> None:
        entry = _entry(path, tarfile.SYMTYPE, 0o777)
        entry.linkname = target
        self._add(entry)

    def file(self, path: str, body: bytes, mode: int = 0o644) -> None:
        self.directory(os.path.dirname(path)) if os.path.dirname(path) not in self._seen else None
        entry = _entry(path, tarfile.REGTYPE, mode)
        entry.size = len(body)
        self._add(entry, io.BytesIO(body))

    def packages(self, paths: Iterable[Path]) -> None:
        for path in paths:
            self._package(path)

    def _package(self, path: Path) -> None:
        with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", path], stdout=subprocess.PIPE) as dpkg:
            assert dpkg.stdout is not None
            with tarfile.open(fileobj=dpkg.stdout, mode="r|") as tar:
                for entry in tar:
                    entry.name = _merged(entry.name)
                    if entry.islnk():
                        entry.linkname = _merged(entry.linkname)
                    if entry.name and not entry.name.startswith(_UNWANTED_PATHS):
                        entry.mtime = 0
                        self._add(entry, tar.extractfile(entry) if entry.isreg() else None)
        if dpkg.returncode != 0:
            raise RuntimeError(f"dpkg-deb cannot read {path}")

    def _add(self, entry: tarfile.TarInfo, body: IO[bytes] | None = None) -> None:
        if entry.name not in self._seen:
            self._seen.add(entry.name)
            self._tar.addfile(entry, body)


def _entry(path: str, kind: bytes, mode: int, owner: int = 0) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(path)
    entry.type, entry.mode, entry.uid, entry.gid = kind, mode, owner, owner
    return entry


def _merged(path: str) -> str:
    """`path` in a file system where /bin, /sbin, /lib and /lib64 are links into /usr; '' for these links."""
    path = path.removeprefix("./").strip("/")
    top = path.split("/", 1)[0]
    if top in ("bin", "sbin", "lib", "lib64"):
        return f"usr/{path}" if "/" in path else ""
    return "" if path == "." else path


def _download(names: Iterable[str]) -> dict[str, Path]:
    """`names` and all they depend on, without what workloads never use: package -> its .deb."""
    wanted = sorted(names)
    directory = CACHE / f"packages-{_key(*wanted)}"
    installer = ROOT / "packaging" / "node" / "install"
    done = subprocess.run(
        [installer, "--packages", directory, *wanted], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"cannot download {', '.join(wanted)}: {done.stderr.strip()}")
    debs = {path.name.split("_")[0]: path for path in sorted(directory.glob("*.deb"))}
    return {
        name: path
        for name, path in debs.items()
        if name in wanted or not any(fnmatch(name, pattern) for pattern in _UNWANTED)
    }


def _image_config(recipe: Recipe, diff_ids: list[str]) -> dict[str, Any]:
    return {
        "architecture": _architecture(),
        "os": "linux",
        "config": {
            "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8",
                    "PGDATA=/var/lib/postgresql/data"],
            "Cmd": list(recipe.command),
        },
        "rootfs": {"type": "layers", "diff_ids": diff_ids},
    }  # fmt: skip


def _architecture() -> str:
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())


def _write_archive(out: IO[bytes], layers: list[Path], config: bytes) -> None:
    descriptors = [
        {
            "mediaType": "application/vnd.oci.image.layer.v1.tar",
            "digest": _digest(p),
            "size": p.stat().st_size,
        }
        for p in layers
    ]
    manifest = json.dumps({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": _descriptor("application/vnd.oci.image.config.v1+json", config),
        "layers": descriptors,
    }).encode()  # fmt: skip
    index = json.dumps({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [_descriptor("application/vnd.oci.image.manifest.v1+json", manifest)
                      | {"platform": {"architecture": _architecture(), "os": "linux"}}],
    }).encode()  # fmt: skip
    with tarfile.open(fileobj=out, mode="w") as tar:
        for body in (manifest, config):
            _add_bytes(tar, f"blobs/sha256/{hashlib.sha256(body).hexdigest()}", body)
        for path in layers:
            tar.add(path, f"blobs/sha256/{_digest(path).removeprefix('sha256:')}")
        _add_bytes(tar, "index.json", index)
        _add_bytes(tar, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')


def _descriptor(media_type: str, body: bytes) -> dict[str, Any]:
    return {
        "mediaType": media_type,
        "digest": f"sha256:{hashlib.sha256(body).hexdigest()}",
        "size": len(body),
    }


def _add_bytes(tar: tarfile.TarFile, name: str, body: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(body)
    tar.addfile(entry, io.BytesIO(body))


def _digest(path: Path) -> str:
    """The digest of a cached file, computed once."""
    note = path.with_suffix(".sha256")
    if not note.exists():
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        note.write_text(f"sha256:{digest}")
    return note.read_text()


def _cached(name: str, write: Any) -> Path:
    path = _cache() / name
    if not path.exists():
        with tempfile.NamedTemporaryFile(dir=_cache(), delete=False) as out:
            try:
                write(out)
                out.flush()
            except BaseException:
                os.unlink(out.name)
                raise
        _rename(Path(out.name), path)
    return path


def _rename(source: Path, target: Path) -> None:
    """Into place at once; if another run was faster, its result stays."""
    try:
        os.rename(source, target)
    except OSError:
        if not target.exists():
            raise
        shutil.rmtree(source) if source.is_dir() else source.unlink()


def _cache() -> Path:
    CACHE.mkdir(mode=0o755, parents=True, exist_ok=True)
    return CACHE


def _key(*parts: object) -> str:
    return hashlib.sha256(repr((FORMAT, platform.machine(), *parts)).encode()).hexdigest()[:16]


def _all() -> Iterator[Path]:
    for name in sys.argv[1:] or RECIPES:
        yield build(name)


if __name__ == "__main__":
    for archive in _all():
        print(archive)
