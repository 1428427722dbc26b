"""A promise that did not hold."""

from __future__ import annotations


class Violation(AssertionError):
    """A simulated run did what no run may do; the message says what and on which rank."""
