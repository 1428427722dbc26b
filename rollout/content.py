"""What the keys and values of some positions are of: it says all there is to know about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Experts = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Content:
    """Tokens from the start of a context, or from the start of a block, as far as they are
    computed. A row depends on all tokens up to it and on the weights each was computed with, so
    where these are equal the keys and values are, bit for bit."""

    tokens: Sequence[int]
    experts: Experts
    """[len(tokens), L, K], of the pass that computed these rows."""
    weights: Sequence[int]
    """First version that had the weights each row was computed with; never decreasing."""

    def __post_init__(self) -> None:
        num = len(self.tokens)
        assert len(self.experts) == len(self.weights) == num, (
            f"{num} tokens, {len(self.experts)} rows of experts, {len(self.weights)} weights"
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def part(self, start: int, stop: int) -> Content:
        """The positions from `start` to `stop`, or to the last one there is."""
        return Content(
            tokens=tuple(self.tokens[start:stop]),
            experts=self.experts[start:stop].copy(),
            weights=tuple(self.weights[start:stop]),
        )
