"""How things are written for people: sizes, durations, tables, trees, the waterfall of a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from base.trace import Step

Item = TypeVar("Item")
_BAR = 40


def printable(text: str) -> str:
    """`text` with everything that could steer a terminal made visible: it may come from an artifact."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text
    )


def size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def duration(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [list(head), *([printable(cell) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def fields(pairs: Iterable[tuple[str, str]]) -> str:
    shown = [(name, printable(value)) for name, value in pairs if value]
    width = max((len(name) for name, _ in shown), default=0)
    return "\n".join(f"  {name.ljust(width)}  {value}" for name, value in shown)


def tree(
    roots: Sequence[Item], children: Callable[[Item], Sequence[Item]], label: Callable[[Item], str]
) -> list[str]:
    """The lines of a tree, however deep."""
    lines: list[str] = []
    pending = [(root, "", "", True) for root in reversed(roots)]
    while pending:
        item, indent, branch, last = pending.pop()
        lines.append(f"{indent}{branch}{printable(label(item))}")
        below = indent + ("" if not branch else "   " if last else "│  ")
        kids = children(item)
        for number in range(len(kids) - 1, -1, -1):
            is_last = number == len(kids) - 1
            pending.append((kids[number], below, "└─ " if is_last else "├─ ", is_last))
    return lines


def waterfall(steps: Sequence[Step]) -> str:
    """Each step where it was in time, one line each."""
    total = max((step.start_s + step.duration_s for step in steps), default=0.0) or 1.0
    names = [printable(step.name) for step in steps]
    width = max(map(len, names), default=0)
    lines = []
    for name, step in sorted(zip(names, steps, strict=True), key=lambda line: line[1].start_s):
        start = min(_BAR - 1, int(step.start_s / total * _BAR))
        length = max(1, min(_BAR - start, round(step.duration_s / total * _BAR)))
        bar = " " * start + "█" * length
        failed = "  failed" if step.failed else ""
        lines.append(f"  {name.ljust(width)} {bar.ljust(_BAR)} {duration(step.duration_s):>9}{failed}")
    return "\n".join(lines)
