"""A question with one answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A question and its one answer."""

    question: str
    answer: str

    def accepts(self, reply: str) -> bool:
        """Whether `reply` is the answer, whatever its case, quotes and final punctuation; numbers
        are compared as numbers."""
        given = reply.strip().strip("\"'`*.!$ ").casefold()
        if given == self.answer.casefold():
            return True
        try:
            return float(given.replace(",", "")) == float(self.answer)
        except ValueError:
            return False
