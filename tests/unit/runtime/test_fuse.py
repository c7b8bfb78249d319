"""Files served through the kernel's FUSE: what a reader sees is what the content says, or an error."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from runtime import fuse
from runtime.fuse import Buffer, FileServer, ServedFile

DATA = os.urandom(3 << 20) + b"end"


class Content:
    def read(self, file: int, offset: int, size: int) -> Sequence[Buffer]:
        if file == 2:
            raise ValueError("the store is gone")
        part = memoryview(DATA)[offset : offset + size]
        return [part[:1000], part[1000:]]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "pages"
    directory.mkdir()
    files = [
        ServedFile("direct.img", len(DATA)),
        ServedFile("cached.img", len(DATA), direct=False),
        ServedFile("broken.img", len(DATA)),
    ]
    server = FileServer(fuse.mount(directory), files, Content())
    yield directory
    fuse.unmount(directory)
    server.join()
    assert not os.path.ismount(directory)


@pytest.mark.parametrize("name", ["direct.img", "cached.img"])
def test_a_file_reads_as_its_content(served: Path, name: str) -> None:
    path = served / name
    assert path.stat().st_size == len(DATA)
    assert path.stat().st_mode & 0o777 == 0o400
    assert path.read_bytes() == DATA
    with open(path, "rb") as file:
        assert os.pread(file.fileno(), 4096, 12345) == DATA[12345 : 12345 + 4096]
        parts = [bytearray(1 << 20), bytearray(5)]
        assert os.preadv(file.fileno(), parts, 7) == (1 << 20) + 5
        assert b"".join(parts) == DATA[7 : 7 + (1 << 20) + 5]


def test_what_fails_is_an_error_for_the_reader(served: Path) -> None:
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        (served / "broken.img").read_bytes()


def test_nothing_else_is_there_and_nothing_can_be_changed(served: Path) -> None:
    assert not (served / "other.img").exists()
    for flags in (os.O_WRONLY, os.O_RDWR):
        with pytest.raises(OSError, match=os.strerror(errno.EROFS)):
            os.open(served / "direct.img", flags)


def test_a_reader_hears_when_the_server_was_killed(tmp_path: Path) -> None:
    """Nobody waits for ever: the kernel ends every read when the last descriptor is gone."""
    script = (
        "import sys, time; from pathlib import Path; from runtime import fuse\n"
        "class Never:\n"
        "    def read(self, *_):\n"
        "        print('asked', flush=True); time.sleep(600)\n"
        "fuse.FileServer(fuse.mount(Path(sys.argv[1])), [fuse.ServedFile('a', 4096)], Never())\n"
        "time.sleep(600)"
    )
    server = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        while not os.path.ismount(tmp_path):
            assert server.poll() is None
        reader = subprocess.Popen(["cat", tmp_path / "a"], stderr=subprocess.PIPE)
        assert server.stdout is not None
        assert server.stdout.readline() == b"asked\n"
        server.send_signal(signal.SIGKILL)
        assert reader.wait(10) == 1
    finally:
        server.kill()
        server.wait()
        fuse.unmount(tmp_path)


def test_it_ends_though_another_mount_namespace_has_a_copy(tmp_path: Path) -> None:
    server = FileServer(fuse.mount(tmp_path), [ServedFile("a", len(DATA))], Content())
    unshare = ["unshare", "--mount", "--propagation", "private", "sh", "-c", "echo copied; exec sleep 60"]
    copy = subprocess.Popen(unshare, stdout=subprocess.PIPE)
    try:
        assert copy.stdout is not None
        assert copy.stdout.readline() == b"copied\n"
        fuse.unmount(tmp_path)
        ending = threading.Thread(target=server.join, daemon=True)
        ending.start()
        ending.join(10)
        assert not ending.is_alive()
    finally:
        copy.kill()
        copy.wait()
