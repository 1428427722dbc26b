"""What goes wrong with a model folder."""

from __future__ import annotations


class ModelError(ValueError):
    """A model folder cannot be used; the message names the file, field or tensor, and a cure."""
