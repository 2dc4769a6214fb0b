"""A strict reader of the text format of Prometheus."""

from __future__ import annotations

import math
import re

SAMPLE = re.compile(r'([a-zA-Z_:][\w:]*)(?:\{((?:[a-zA-Z_]\w*="(?:[^"\\\n]|\\[\\n"])*",?)*)\})? (\S+)')
LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')
UNESCAPE = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}


def series(
    name: str, topic: str, *, retry: bool = False, system: bool = False, **labels: str
) -> tuple[str, frozenset[tuple[str, str]]]:
    """Return a series of a topic as `scraped` has it."""
    labels |= {"topic": topic, "is_retry": str(retry).lower(), "is_system": str(system).lower()}
    return f"rocketmq_{name}", frozenset(labels.items())


def scraped(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return the samples by name and labels. Each line must be well-formed, each series announced once and whole."""
    found: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    announced: set[str] = set()
    current = ""
    for line in text.split("\n")[:-1]:
        if line.startswith("# HELP "):
            current = line.split(" ")[2]
            assert current not in announced
            announced.add(current)
        elif line.startswith("# TYPE "):
            assert line.split(" ")[2] == current
            assert line.split(" ")[3] in ("counter", "gauge", "summary")
        else:
            match = SAMPLE.fullmatch(line)
            assert match is not None, line
            assert match[1] in (current, f"{current}_sum", f"{current}_count")
            labels = frozenset(
                (name, re.sub(r"\\.", lambda escape: UNESCAPE[escape[0]], value))
                for name, value in LABEL.findall(match[2] or "")
            )
            assert (match[1], labels) not in found
            found[match[1], labels] = float(match[3])
            assert math.isfinite(found[match[1], labels])
    assert text == "" or text.endswith("\n")
    return found
