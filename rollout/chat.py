"""Messages to tokens and back, without ever tokenising a sampled token again."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from interlace.rollout.trajectory import Source

Piece = tuple[str, Source]
Part = tuple[str, int | None]
_SOURCES = tuple(Source)
_KEPT = 256
"""Pieces of a template whose control tokens are remembered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """Tokens to append to a ledger, one source for each."""

    token_ids: list[int]
    sources: list[Source]


class Chat:
    """Speaks a model's chat template, or plain text where the model has none.

    The ids of `open` are those of tokenising the whole rendered text at once, except that control
    tokens spelled out in a message or an observation stay ordinary text: nobody can end a turn
    or become another role by writing "<|im_end|>". `open` followed by sampled tokens and `reply`
    is what the template makes of the whole conversation, given a template that only appends.

    Reads `tokenizer.json` and the chat template of a local folder; runs no code from it. The
    first ValueError is at construction: no tokenizer, or one whose text depends on what stands
    before a control token. A template that rewrites earlier turns serves single turns:
    `append_only` is then false and `reply` raises.
    """

    def __init__(self, tokenizer_folder: str | Path) -> None:
        folder = Path(tokenizer_folder)
        if not (folder / "tokenizer.json").is_file():
            raise ValueError(f"{folder}: no tokenizer.json")
        self._tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(
            str(folder), local_files_only=True
        )
        self._plain = self._own_backend(encode_special_tokens=True)
        special = {
            token.content: number
            for number, token in self._plain.get_added_tokens_decoder().items()
            if token.special
        }
        self._special: dict[str, int] = special
        longest_first = sorted(special, key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        # A pattern of thousands of tokens is slow, and a template writes the same over and over.
        self._parts = lru_cache(_KEPT)(self._split)
        self._has_template = self._tokenizer.chat_template is not None
        self._trims = self._has_template and "  x  " not in self._render(_user("  x  "))
        self._check_split()
        self._problem: str | None = None
        self._end_of_turn = ""
        self._before, self._after = self._derive_reply()
        self.end_of_turn_ids = self._end_ids(folder)
        """Sampling one of these ends a turn; the first is the template's own, where it has one."""

    @property
    def append_only(self) -> bool:
        """Whether conversations of several turns are possible (`reply` works)."""
        return self._problem is None

    def open(self, messages: Sequence[Mapping[str, str]]) -> Rendered:
        """The tokens up to where the model answers; contents are PROMPT, the rest TEMPLATE.

        A token that spans a border belongs to the content. Plain text mode: every content and a
        newline, behind the tokenizer's beginning-of-text token if it always sets one.
        """
        if not messages:
            raise ValueError("a conversation needs at least one message")
        pieces: list[Piece] = []
        if not self._has_template:
            for message in messages:
                pieces += [(message["content"], Source.PROMPT), ("\n", Source.TEMPLATE)]
            return self._encode([(self._begin_of_text(), Source.TEMPLATE), *pieces])
        marks = [_mark(index) for index in range(len(messages))]
        marked = [
            {**message, "content": mark} for message, mark in zip(messages, marks, strict=True)
        ]
        rest = self._render(marked)
        for index, (message, mark) in enumerate(zip(messages, marks, strict=True)):
            before, found, rest = rest.partition(mark)
            if not found:
                raise ValueError(f"the chat template drops message {index} ({message['role']})")
            content = message["content"].strip() if self._trims else message["content"]
            pieces += [(before, Source.TEMPLATE), (content, Source.PROMPT)]
        pieces.append((rest, Source.TEMPLATE))
        if "".join(text for text, _ in pieces) != self._render(messages):
            raise ValueError(
                "the chat template rewrites the content of a message; give the prompt as token ids"
            )
        return self._encode(pieces)

    def reply(self, observation: str, *, closed: bool) -> Rendered:
        """The tokens between a sampled turn and the next: OBSERVATION, the rest TEMPLATE.

        They close the turn (unless `closed`: the model sampled an end-of-turn token), hold the
        observation as a user message and open the next turn. ValueError if not `append_only`.
        """
        if self._problem is not None:
            raise ValueError(self._problem)
        before = self._before.removeprefix(self._end_of_turn) if closed else self._before
        content = observation.strip() if self._trims else observation
        return self._encode(
            [
                (before, Source.TEMPLATE),
                (content, Source.OBSERVATION),
                (self._after, Source.TEMPLATE),
            ]
        )

    def encode_choice(self, text: str) -> list[int]:
        """The tokens a turn must spell to say `text`: no control token, nothing around it."""
        return list(self._plain.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, for people and environments; control tokens are left out."""
        text: str = self._plain.decode(list(token_ids), skip_special_tokens=True)
        return text

    def _own_backend(self, *, encode_special_tokens: bool) -> Any:
        backend = Tokenizer.from_str(self._tokenizer.backend_tokenizer.to_str())
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = encode_special_tokens
        return backend

    def _render(self, messages: Sequence[Mapping[str, str]], *, answer_next: bool = True) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=answer_next,
            )
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(f"the chat template refuses roles {roles}: {error}") from error
        return text

    def _begin_of_text(self) -> str:
        """The tokenizer's first control token where plain text always gets one."""
        ids = self._tokenizer("", add_special_tokens=True)["input_ids"]
        return self._tokenizer.bos_token if ids == [self._tokenizer.bos_token_id] else ""

    def _encode(self, pieces: Sequence[Piece]) -> Rendered:
        """Control tokens come from TEMPLATE pieces only; the text between two is one text."""
        token_ids: list[int] = []
        sources: list[Source] = []
        text: list[str] = []
        owner = bytearray()  # of each character

        def flush() -> None:
            if not owner:
                return
            encoding = self._plain.encode("".join(text), add_special_tokens=False)
            token_ids.extend(encoding.ids)
            sources.extend(_owners(owner, encoding.offsets))
            text.clear()
            owner.clear()

        for piece, source in pieces:
            own = source is Source.TEMPLATE
            for words, control in self._parts(piece) if own else ((piece, None),):
                text.append(words)
                owner += bytes([source]) * len(words)
                if control is not None:
                    flush()
                    token_ids.append(control)
                    sources.append(source)
        flush()
        return Rendered(token_ids=token_ids, sources=sources)

    def _split(self, piece: str) -> list[Part]:
        """Text, and the control token behind it; the last text has none."""
        parts: list[Part] = []
        start = 0
        for found in self._special_pattern.finditer(piece):
            parts.append((piece[start : found.start()], self._special[found[0]]))
            start = found.end()
        return [*parts, (piece[start:], None)]

    def _check_split(self) -> None:
        """Text between control tokens must not depend on what stands before them."""
        text = "Two words.\nA line"
        if self._has_template:
            text = self._render(_user(text))
        whole = self._own_backend(encode_special_tokens=False).encode(
            text, add_special_tokens=False
        )
        if self._encode([(text, Source.TEMPLATE)]).token_ids != whole.ids:
            raise ValueError(
                "this tokenizer reads text behind a control token differently from text at the "
                "beginning, so turns cannot be appended token by token"
            )

    def _derive_reply(self) -> tuple[str, str]:
        """What the template writes before and after an observation that follows a sampled turn."""
        if not self._has_template:
            return "\n", "\n"
        marks = [_mark(index) for index in range(5)]
        roles = ("user", "assistant", "user", "assistant", "user")
        talk = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
        try:
            first, second, third = (self._render(talk[:num]) for num in (1, 3, 5))
        except ValueError as error:
            self._problem = str(error)
            return "", ""
        _, _, tail = second.partition(marks[1])
        before, _, after = tail.partition(marks[2])
        found = self._special_pattern.match(before)
        self._end_of_turn = found[0] if found else ""
        if second != first + marks[1] + before + marks[2] + after or third != (
            second + marks[3] + before + marks[4] + after
        ):
            self._problem = (
                "the chat template does not only append: with a second turn it renders the first "
                "differently, so sampled tokens could not be kept. Only single turns are possible"
            )
        return before, after

    def _end_ids(self, folder: Path) -> tuple[int, ...]:
        ids = [self._special[self._end_of_turn]] if self._end_of_turn else []
        generation = folder / "generation_config.json"
        declared: Any = None
        if generation.is_file():
            declared = json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id")
        more = declared if isinstance(declared, list) else [declared]
        ids += [one for one in (self._tokenizer.eos_token_id, *more) if one is not None]
        return tuple(dict.fromkeys(ids))


def _owners(owner: bytes | bytearray, offsets: Sequence[tuple[int, int]]) -> Iterator[Source]:
    """Of tokens, given those of characters: the first that is not the template's."""
    template = bytes([Source.TEMPLATE])
    for start, stop in offsets:
        one = owner[start : start + 1]
        if one == template:
            one = owner[start:stop].lstrip(template)[:1]
        yield _SOURCES[one[0]] if one else Source.TEMPLATE


def _mark(index: int) -> str:
    """Text that no template contains, standing in for a message's content."""
    return f"\ue000{index}\ue001"


def _user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]
