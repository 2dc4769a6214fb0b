"""The logger of the library."""

import logging

log = logging.getLogger("mqstore")
