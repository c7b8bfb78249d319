"""Fail if a test was skipped that tests/README.md does not list.

    python .ci/skips.py RESULTS.xml tests/README.md

A listed test is a line "- `tests/node/test_x.py::test_name`: reason"; a parametrised one is listed once, by
the name of its function.
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

_LISTED = re.compile(r"^- `(?P<test>\S+::\S+)`: +\S", re.MULTILINE)


def main(results: Path, readme: Path) -> int:
    listed = {found["test"] for found in _LISTED.finditer(readme.read_text())}
    skipped = {}
    ran = 0
    for case in ElementTree.parse(results).iter("testcase"):
        reason = case.find("skipped")
        if reason is None:
            ran += 1
        else:
            skipped[_identifier(case.get("classname", ""), case.get("name", ""))] = reason.get("message", "")
    unlisted = sorted(set(skipped) - listed)
    for test in unlisted:
        print(f"{test} was skipped ({skipped[test]}), and {readme} gives no reason for it", file=sys.stderr)
    if ran == 0:
        print("no test ran", file=sys.stderr)
    return 1 if unlisted or ran == 0 else 0


def _identifier(classname: str, name: str) -> str:
    """('tests.unit.test_x.TestY', 'test_z[1]') is 'tests/unit/test_x.py::TestY::test_z'."""
    parts = classname.split(".")
    module = next((i for i, part in enumerate(parts) if part.startswith("test_")), len(parts) - 1)
    path = "/".join(parts[: module + 1]) + ".py"
    return "::".join([path, *parts[module + 1 :], name.partition("[")[0]])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
