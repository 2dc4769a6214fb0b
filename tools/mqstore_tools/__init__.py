"""The command `mqstore`: looks at stores, checks, mends, fills and empties them by the library."""

from typing import Final

JSON_ASKED: Final = "mqstore_tools.json"
"""Key in the `meta` of click's contexts: whether the command line asks for JSON."""
