"""Count sentences of a kind that a first reading stumbles over, and fail if there are more than before.

Strings of more than 30 characters in store/ and tools/, the text of docs/, and the names of tests. `make lint` runs it:

    python -m scripts.tics
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from pathlib import Path

_ROOT = Path(__file__).parent.parent
# pattern, what to write instead, limits for source and docs. Lower a limit when the count falls.
_TEXTS = {
    r"\b(is|are|was|were) no (?!longer\b|more\b)[a-z]": ('"is not a" for "is no"', 1, 4),
    r"\b[Ww]hat (is|was|has|had|they|the|it|a)\b": ('the noun for "what is ..."', 2, 10),
    r"(?:^|[.;:] )(Who|Whoever)\b|\bfor who\b": ("the noun for who", 0, 0),
    r"\b(told|tells|telling)\b": ('"reports", "logs" for "tells"', 2, 0),
    r"\bgo(es)? on\b": ('"continues" for "goes on"', 0, 0),
    r"\b(lies|lie|stands?|stood)\b": ('"is" for "lies" and "stands"', 0, 4),
    r"\bmoments?\b": ('"time" for "moment"', 0, 1),
    r"\b(begun|beside|behind|anew)\b": ('"started", "next to", "after", "again"', 4, 5),
    r"\b(is|are|was|were) to [a-z]+\b": ('"must", "will" for "is to"', 0, 0),
    r"\b(without|of it|of them|by it)[.;:]": ("the thing at the end of a sentence", 0, 2),
    r"[^.\n]*: [^.\n:]*: [^.\n]*": ("two sentences for two colons", 54, 11),
}
_NAMES = {
    r"^test_(what|who|which|where|how)_": ("the thing first", 0),
    r"_(told|tells?|telling)(_|$)": ('"reports", "logs" for "tells"', 0),
    r"^.{71,}$": ("at most 70 characters", 0),
    r"_(of|for|at|by|in|it|is|does|has|from|with|to)$": ("no preposition at the end", 9),
}


def _strings(folder: str) -> list[str]:
    return [
        node.value
        for path in (_ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) > 30
    ]


def main() -> int:
    """Print each count above its limit. Return the exit code."""
    source = [text for folder in ("store", "tools") for text in _strings(folder)]
    docs = [
        re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        for path in (_ROOT / "docs").rglob("*.md")
    ]
    tests = [
        name
        for path in (_ROOT / "tests").rglob("*.py")
        for name in re.findall(r"def (test_\w+)", path.read_text(encoding="utf-8"))
    ]
    counts: Counter[tuple[str, str]] = Counter()
    limits: dict[tuple[str, str], int] = {}
    for pattern, (instead, source_limit, docs_limit) in _TEXTS.items():
        for where, texts, limit in (("store/ and tools/", source, source_limit), ("docs/", docs, docs_limit)):
            limits[where, instead] = limit
            counts[where, instead] = sum(len(re.findall(pattern, text)) for text in texts)
    for pattern, (instead, limit) in _NAMES.items():
        limits["tests/", instead] = limit
        counts["tests/", instead] = sum(bool(re.search(pattern, name)) for name in tests)
    worse = [key for key, count in counts.items() if count > limits[key]]
    for where, instead in worse:
        print(f"{where}: {counts[where, instead]} places, {limits[where, instead]} before. Write {instead}.")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
