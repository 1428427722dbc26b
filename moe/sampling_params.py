"""How the next token is chosen."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling of one turn. Temperature 0 is greedy; ties go to the lowest token id.

    Filters apply in this order: allowed tokens or choices, temperature, top-k, top-p, renormalise.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    max_tokens: int = 64
    stop_token_ids: tuple[int, ...] = ()
    """A turn ends when one of these is sampled; the token belongs to the turn."""
    allowed_token_ids: tuple[int, ...] = ()
    """Only these may be sampled; empty allows the whole vocabulary."""
    choices: tuple[tuple[int, ...], ...] = ()
    """Token sequences, one of which the turn must spell; empty allows any text."""
    stop_strings: tuple[str, ...] = ()
    """A turn ends with the token that completes one of these in its text."""
