"""The command `mqstore`: looks at stores, checks, mends, fills and empties them. What it knows is the library's."""

from typing import Final

JSON_ASKED: Final = "mqstore_tools.json"
"""Key in the `meta` of click's contexts: whether the command line asks for JSON."""
