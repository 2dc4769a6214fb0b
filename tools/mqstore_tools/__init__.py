"""The command `mqstore`: inspects, checks, repairs, fills and drains stores by the library."""

from typing import Final

JSON_ASKED: Final = "mqstore_tools.json"
"""Key in the `meta` of click's contexts. True if the command line has --json."""
