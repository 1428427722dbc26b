"""Token ids as text, token by token, for people to read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from .config import ConfigError

_UNFINISHED = "\ufffd"
"""What a decoder writes where bytes of a character are missing."""


class TokenText:
    """The words of one tokenizer. Control tokens are shown, not left out."""

    def __init__(self, folder: Path) -> None:
        """ConfigError if the folder has no tokenizer.json."""
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(f"{folder} has no tokenizer.json: give the model's folder as --model")
        self._tokenizer = Tokenizer.from_file(str(file))

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """One text per token; together they are the text of all.

        A token that ends within a character gets an empty text, and the next one the character.
        """
        pieces: list[str] = []
        context: list[int] = []
        waiting: list[int] = []
        for token_id in token_ids:
            waiting.append(token_id)
            before = self._decode(context)
            text = self._decode([*context, *waiting])
            if text.endswith(_UNFINISHED) and len(waiting) < 4:
                pieces.append("")
                continue
            pieces.append(visible(text[len(before) :]))
            context, waiting = waiting, []
        if waiting:
            pieces[-1] = visible(self._decode([*context, *waiting])[len(self._decode(context)) :])
        return pieces

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))


def visible(text: str) -> str:
    """The text with control characters spelled out, so that none of them reaches a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
