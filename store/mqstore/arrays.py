"""numpy, imported when an array is first used: `from mqstore import arrays as np`.

A program that opens a store, puts and gets needs no array, and numpy takes longer to import than all of mqstore. So a
module on that path imports this one, and has no array of its own before a function is called. For annotations it has
the names of `numpy.typing` too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy import *  # noqa: F403
    from numpy.typing import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        import numpy

        # All names at once: later uses find them here, as fast as in numpy itself.
        globals().update((key, value) for key, value in vars(numpy).items() if not key.startswith("__"))
        return getattr(numpy, name)
