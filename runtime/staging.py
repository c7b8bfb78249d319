"""Where a restore waits for its container: `run_dir/restore/NAMESPACE/ID`.

    images/        CRIU's images; its page images are links into
    pages/         where the memory is served (`runtime.fuse`) while CRIU reads it
    pages.sock     whoever fetches the memory listens here for the descriptor to serve it by
    source.json    what all of it was fetched from, written last

Laid out by `runtime.fetch`, and light to import: the engine needs no more where the command line has fetched.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from base.config import Config
from base.errors import CedanaError
from runtime import fuse, rootfs
from runtime.container import Container, Mount

_DOOMED = ".doomed-"
_RESTORED = "trusted.cedana.restored"
"""On an upper directory: the digest of the checkpoint it was restored from."""


@dataclass(frozen=True)
class Source:
    digest: str
    """The artifact's."""
    store: str
    """A reference, or the directory of containerd's content."""
    upper: str = ""
    """The upper directory that has the root filesystem's difference already."""


@dataclass(frozen=True)
class Staging:
    path: Path

    @classmethod
    def of(cls, config: Config, namespace: str, container_id: str) -> Staging:
        return cls(config.run_dir / "restore" / namespace / container_id)

    @classmethod
    def around(cls, images: Path, config: Config) -> Staging | None:
        """The staging that `images` belongs to; None if an orchestrator has put them elsewhere."""
        staging = cls(images.parent)
        return staging if images.is_relative_to(config.run_dir / "restore") and staging.source else None

    @property
    def images(self) -> Path:
        return self.path / "images"

    @property
    def pages(self) -> Path:
        return self.path / "pages"

    @property
    def source(self) -> Source | None:
        """None if nothing was completely fetched."""
        try:
            return Source(**json.loads((self.path / "source.json").read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def make(self) -> None:
        for directory in (self.images, self.pages):
            directory.mkdir(mode=0o700, parents=True)
        for parent in (self.path, self.path.parent, self.path.parent.parent):
            parent.chmod(0o700)

    def note(self, source: Source) -> None:
        fresh = self.path / "source.json.new"
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(asdict(source), file)
        fresh.rename(self.path / "source.json")

    def ready_for(self, store: str, mounts: Sequence[Mount]) -> bool:
        """Whether everything is there, the difference on the writable layer of `mounts` too."""
        source = self.source
        if source is None or not source.upper or source.store != store:
            return False
        with suppress(CedanaError):
            return source.upper == str(rootfs.overlay_dirs(mounts).upper)
        return False

    @contextmanager
    def socket_path(self) -> Iterator[str]:
        """A short name for the socket: its address has 108 bytes at most."""
        fd = os.open(self.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield f"/proc/self/fd/{fd}/pages.sock"
        finally:
            os.close(fd)

    def hand_over(self, device: int) -> bool:
        """Give the descriptor of the file system on `pages` to whoever fetches; False if nobody does."""
        with socket.socket(socket.AF_UNIX) as fetching:
            try:
                with self.socket_path() as path:
                    fetching.connect(path)
            except (FileNotFoundError, ConnectionRefusedError):
                return False
            socket.send_fds(fetching, [b"\0"], [device])
            return True

    def discard(self) -> None:
        """Forget what was fetched."""
        fuse.unmount(self.pages)
        shutil.rmtree(self.path, ignore_errors=True)

    def discard_behind(self, config: Config) -> None:
        """`discard`, in a process of its own: nobody waits for it."""
        fuse.unmount(self.pages)
        doomed = config.run_dir / "restore" / f"{_DOOMED}{os.urandom(8).hex()}"
        with suppress(FileNotFoundError):
            self.path.rename(doomed)
            _remove_behind([doomed])


def sweep(config: Config) -> None:
    """Finish what a `discard_behind` began that was killed."""
    if doomed := list((config.run_dir / "restore").glob(f"{_DOOMED}*")):
        _remove_behind(doomed)


def _remove_behind(doomed: Sequence[Path]) -> None:
    os.posix_spawn(
        "/bin/rm",
        ["rm", "-rf", "--", *map(str, doomed)],
        {},
        file_actions=[(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)],
        setsid=True,
    )


def mark_restored(container: Container, staging: Staging) -> None:
    """Note on the writable layer of a container that now runs which checkpoint it was restored from."""
    if source := staging.source:
        with suppress(OSError, CedanaError):
            upper = rootfs.overlay_dirs(container.bundle / "rootfs").upper
            os.setxattr(upper, _RESTORED, source.digest.encode())


def restored_from(mounts: Sequence[Mount]) -> str:
    """The digest of the checkpoint that the writable layer of `mounts` was restored from; '' if none."""
    with suppress(OSError, CedanaError):
        return os.getxattr(rootfs.overlay_dirs(mounts).upper, _RESTORED).decode()
    return ""
