"""What a benchmark found: each figure beside what it must be, and how all of them are shown."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Figure:
    value: float
    unit: str
    must: float | None = None
    aim: float | None = None
    limit: float | None = None
    met: bool | None = None


def at_most(
    value: float, unit: str, must: float, aim: float | None = None, limit: float | None = None
) -> Figure:
    return Figure(value, unit, must, aim, limit, value <= must)


def at_least(
    value: float, unit: str, must: float, aim: float | None = None, limit: float | None = None
) -> Figure:
    return Figure(value, unit, must, aim, limit, value >= must)


def finish(bench: str, figures: Mapping[str, Figure]) -> None:
    """Print the table and, as the last line, the JSON object; end with 1 if a figure is not met."""
    width = max(map(len, figures))
    print(f"\n{'figure':<{width}} {'value':>10} {'must':>12} {'aim':>8} {'limit':>8}")
    for name, figure in figures.items():
        bounds = " ".join(
            f"{'' if b is None else f'{b:.2f}':>8}" for b in (figure.must, figure.aim, figure.limit)
        )
        verdict = {True: "met", False: "NOT MET", None: ""}[figure.met]
        print(f"{name:<{width}} {figure.value:>10.2f} {figure.unit:<4}{bounds} {verdict}")
    print(json.dumps({
        "bench": bench,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}",
        "figures": {name: asdict(figure) for name, figure in figures.items()},
    }))  # fmt: skip
    sys.exit(0 if all(figure.met is not False for figure in figures.values()) else 1)
