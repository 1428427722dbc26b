"""What goes wrong with an update."""

from __future__ import annotations


class UpdateError(RuntimeError):
    """New weights were refused or could not be brought to all ranks; the message says why.

    The ranks generate with the weights they had.
    """
