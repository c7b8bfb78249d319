"""Write the program that containerd starts as the shim.

    python packaging/shim_launcher.py TARGET

containerd starts it two or three times per container, so it must be up in milliseconds: the interpreter runs
isolated and without `site` (-IS), and finds our packages by two entries on its path.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from pathlib import Path

_LAUNCHER = """\
#!{python} -IS
import sys

sys.path.insert(0, {code!r})
sys.path.append({packages!r})

from shim.launch import main

sys.exit(main(sys.argv))
"""

_SHEBANG_LIMIT = 255
"""Linux reads no more of the first line (include/linux/binfmts.h, BINPRM_BUF_SIZE)."""


def launcher() -> str:
    """The program, for the environment that this interpreter belongs to."""
    spec = importlib.util.find_spec("shim")
    if spec is None or spec.origin is None:
        raise SystemExit(f"cedana is not installed in {sys.prefix}: pip install it there first")
    code = str(Path(spec.origin).parent.parent)
    text = _LAUNCHER.format(python=sys.executable, code=code, packages=sysconfig.get_path("purelib"))
    if len(text.splitlines()[0]) > _SHEBANG_LIMIT:
        raise SystemExit(f"the path of {sys.executable} is too long for a program's first line")
    return text


def main() -> None:
    target = Path(sys.argv[1])
    text = launcher()
    if target.exists() and target.read_text() == text:
        return
    new = target.with_name(f".{target.name}.new")
    new.write_text(text)
    new.chmod(0o755)
    os.replace(new, target)


if __name__ == "__main__":
    main()
