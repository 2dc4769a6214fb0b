"""The pages of the documentation, and the Python examples on them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
OF_ROOT = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md")
PAGES = [*(ROOT / name for name in OF_ROOT), *sorted((ROOT / "docs").glob("*.md"))]


def examples(page: Path) -> list[str]:
    """Return the Python examples of a page."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M)
