"""One turn in a rank's hands, from its request to its result."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from .block_manager import Lease
from .messages import TurnRequest, TurnResult
from .prefix_tree import Experts


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, blocks and progress of one turn. KV exists for the first `num_computed` tokens."""

    request: TurnRequest
    max_tokens: int
    """Tokens this turn may sample; the request's, or fewer at the end of the context."""
    token_ids: list[int]
    """Context and what was sampled behind it."""
    experts: Experts
    """[context + max_tokens, L, K]; filled for the first `num_computed` positions."""
    lease: Lease | None = None
    num_computed: int = 0
    num_cached: int = 0
    """Of the context, found in the cache when the turn was first admitted."""
    num_prefilled: int = 0
    """Rows prefilled; after a preemption tokens are counted again."""
    num_forwarded: int = 0
    """Leading tokens that the trajectory has forwarded, in this turn or an earlier one."""
    arrival: int = 0
    """Place in the order of arrival: who came later gives way first."""
    aborted: bool = False
    logprobs_raw: list[float] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        request: TurnRequest,
        *,
        max_context: int,
        expert_shape: tuple[int, int],
        generated: Iterable[int] = (),
    ) -> Sequence:
        """A sequence of which nothing is computed here. `generated` was sampled elsewhere.

        ValueError if the context leaves no room to sample.
        """
        room = max_context - len(request.token_ids)
        if room < 1 or not request.token_ids:
            raise ValueError(
                f"trajectory {request.trajectory}: {len(request.token_ids)} context tokens leave "
                f"no room to sample: a context holds 1 to {max_context}"
            )
        max_tokens = min(request.sampling.max_tokens, room)
        total = len(request.token_ids) + max_tokens
        return cls(
            request=request,
            max_tokens=max_tokens,
            token_ids=[*request.token_ids, *generated],
            num_forwarded=request.experts_from,
            experts=np.zeros((total, *expert_shape), np.uint8),
        )

    @property
    def num_context(self) -> int:
        return len(self.request.token_ids)

    @property
    def generated(self) -> list[int]:
        return self.token_ids[self.num_context :]

    @property
    def num_uncomputed(self) -> int:
        """Tokens still to forward: the context's, or after a preemption all of them again."""
        return len(self.token_ids) - self.num_computed

    def result(self, finish: str) -> TurnResult:
        """The finished turn, with the experts the ledger does not have yet."""
        start = min(self.request.experts_from, self.num_computed)
        experts = np.ascontiguousarray(self.experts[start : self.num_computed])
        num, layers, top_k = experts.shape
        return TurnResult(
            trajectory=self.request.trajectory,
            turn=self.request.turn,
            token_ids=self.generated,
            logprobs_raw=self.logprobs_raw,
            logprobs=self.logprobs,
            versions=self.versions,
            kv_versions=list(self.versions),
            experts=experts.tobytes(),
            experts_shape=(num, layers, top_k),
            finish=finish,
            cached_tokens=self.num_cached,
            prefill_tokens=self.num_prefilled,
        )
