"""Debian packages of another suite, fetched without touching the machine's own apt state.

A `Suite` is a private apt: its own source list, package lists and (empty) dpkg status, so that apt resolves
the whole closure of a package, checks every signature against Debian's archive keyring, and downloads it.
The mirror is the one that the machine itself is set up with; nothing is installed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

KEYRINGS = (
    Path("/usr/share/keyrings/debian-archive-keyring.pgp"),
    Path("/usr/share/keyrings/debian-archive-keyring.gpg"),
)


class InstallError(Exception):
    """A step of the installation failed; the message says which and what to do."""


class Suite:
    """One Debian suite ("sid", "trixie"); `work` keeps its package lists between runs."""

    def __init__(self, name: str, work: Path, etc: Path = Path("/etc/apt")) -> None:
        self.name = name
        self.work = work
        self.etc = etc
        self._ready = False

    def download(self, packages: Sequence[str], directory: Path) -> list[Path]:
        """Download `packages` and all they depend on into `directory`; returns the .deb files."""
        self._update()
        (directory / "partial").mkdir(parents=True, exist_ok=True)
        self._apt(
            "-o", f"Dir::Cache::archives={directory}", "install", "--download-only", "--yes",
            "--no-install-recommends", *packages,
        )  # fmt: skip
        shutil.rmtree(directory / "partial")
        (directory / "lock").unlink(missing_ok=True)
        return sorted(directory.glob("*.deb"))

    def extract(self, packages: Sequence[str], directory: Path) -> Path:
        """Unpack the closure of `packages` into `directory`/root, running none of their scripts."""
        root = directory / "root"
        for deb in self.download(packages, directory / "debs"):
            run("dpkg-deb", "--extract", str(deb), str(root))
        return root

    def _update(self) -> None:
        if self._ready:
            return
        for name in ("lists/partial", "cache"):
            (self.work / name).mkdir(parents=True, exist_ok=True)
        (self.work / "status").touch()
        keyring = next((path for path in KEYRINGS if path.exists()), None)
        if keyring is None:
            raise InstallError(f"{KEYRINGS[-1]} is missing: apt install debian-archive-keyring")
        (self.work / "sources.list").write_text(
            f"deb [signed-by={keyring} targets=Packages] {mirror(self.etc)} {self.name} main\n"
        )
        (self.work / "apt.conf").write_text(
            "#clear APT::Update::Post-Invoke;\n#clear APT::Update::Post-Invoke-Success;\n"
            f'Dir::Etc::sourcelist "{self.work}/sources.list";\n'
            'Dir::Etc::sourceparts "/dev/null";\n'
            'Dir::Etc::preferences "/dev/null";\n'
            'Dir::Etc::preferencesparts "/dev/null";\n'
            f'Dir::State "{self.work}";\n'
            f'Dir::State::lists "{self.work}/lists";\n'
            f'Dir::State::status "{self.work}/status";\n'
            f'Dir::Cache "{self.work}/cache";\n'
            'APT::Get::AllowUnauthenticated "false";\n'
            'Acquire::AllowInsecureRepositories "false";\n'
            'Acquire::Retries "3";\n'
        )
        self._apt("update", "--error-on=any")
        self._ready = True

    def _apt(self, *arguments: str) -> None:
        run("apt-get", "-qq", "-c", str(self.work / "apt.conf"), *arguments)


def mirror(etc: Path) -> str:
    """The URI of the Debian archive this machine installs from."""
    found = [uri for uri, suites, components in _sources(etc) if _is_archive(uri, suites, components)]
    if not found:
        raise InstallError(f"{etc} names no Debian archive: add the mirror you use to sources.list")
    return min(found, key=lambda uri: not uri.rstrip("/").endswith("/debian"))


def _is_archive(uri: str, suites: Sequence[str], components: Sequence[str]) -> bool:
    """Not the security archive (its suite is `trixie-security`), nor a disc, nor another's (no `main`)."""
    plain = any(re.fullmatch(r"[a-z]+", suite) for suite in suites)
    return plain and "main" in components and not uri.startswith("cdrom:")


def _sources(etc: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """(URI, suites, components) of every enabled source of binary packages, in apt's order."""
    folder = etc / "sources.list.d"
    for path in [etc / "sources.list", *sorted(folder.glob("*"))]:
        if path.suffix == ".list" and path.is_file():
            yield from _one_line_sources(path.read_text())
        elif path.suffix == ".sources":
            yield from _deb822_sources(path.read_text())


def _one_line_sources(text: str) -> Iterator[tuple[str, list[str], list[str]]]:
    for line in text.splitlines():
        found = re.match(r"\s*deb\s+(?:\[[^\]]*\]\s+)?(\S+)\s+(\S+)\s*([^#]*)", line)
        if found:
            yield found[1], [found[2]], found[3].split()


def _deb822_sources(text: str) -> Iterator[tuple[str, list[str], list[str]]]:
    text = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for stanza in re.split(r"\n\s*\n", text):
        unfolded = re.sub(r"\n[ \t]+", " ", stanza)
        fields = {
            key.strip().lower(): value.split()
            for key, colon, value in (line.partition(":") for line in unfolded.splitlines())
            if colon
        }
        if fields.get("enabled", ["yes"])[0].lower() != "no" and "deb" in fields.get("types", []):
            for uri in fields.get("uris", []):
                yield uri, fields.get("suites", []), fields.get("components", [])


def run(*argv: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """Run a program to its end; its standard output. A failure is raised with the last it said."""
    try:
        done = subprocess.run(
            argv, cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise InstallError(f"cannot run {argv[0]}: {error.strerror}") from error
    if done.returncode != 0:
        said = "\n  ".join((done.stderr + done.stdout).strip().splitlines()[-8:])
        raise InstallError(f"{' '.join(argv[:6])} … failed ({done.returncode}):\n  {said}")
    return done.stdout
