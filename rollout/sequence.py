"""One turn in a rank's hands, from its request to its result."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from .block_manager import Lease
from .content import Content, Experts
from .messages import Held, TurnRequest, TurnResult


class Drawn(NamedTuple):
    """One sampled token."""

    token: int
    logprob_raw: float
    logprob: float
    ends_choice: bool


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, blocks and progress of one turn. KV exists for the first `num_computed` tokens."""

    request: TurnRequest
    max_tokens: int
    """Tokens this turn may sample; the request's, or fewer at the end of the context."""
    token_ids: list[int]
    """Context and what was sampled behind it."""
    experts: Experts
    """[most_tokens, L, K], of the pass that computed each of the first `num_computed`; before the
    first is computed [0, L, K]."""
    lease: Lease | None = None
    num_computed: int = 0
    weights: list[int] = field(default_factory=list)
    """Of each computed token: first version with the weights its keys and values are from. Never
    decreasing, since what was cached comes first: the first token's are the oldest."""
    oldest: int = 0
    """Oldest weights whose keys and values it may still find in the cache."""
    sampled_experts: list[Experts] = field(default_factory=list)
    """Piece by piece, those of leading tokens whose keys and values were given up after it had
    sampled from them: computing them again must not change what the ledger says."""
    num_settled: int = 0
    """Leading tokens that it has sampled from, in this turn, or whose experts the ledger has."""
    num_cached: int = 0
    """Of the context, found in the cache when the turn was first admitted."""
    num_prefilled: int = 0
    """Rows prefilled; after a preemption tokens are counted again."""
    num_forwarded: int = 0
    """Leading tokens that the trajectory has forwarded, in this turn or an earlier one."""
    arrival: int = 0
    """Place in the order of arrival: who came later gives way first."""
    aborted: bool = False
    num_drawn: int = 0
    """Tokens sampled in this turn, and the one that no exchange has agreed to yet."""
    logprobs_raw: list[float] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kv_versions: list[int] = field(default_factory=list)

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
        return cls(
            request=request,
            max_tokens=min(request.sampling.max_tokens, room),
            token_ids=[*request.token_ids, *generated],
            num_settled=request.experts_from,
            num_forwarded=request.experts_from,
            experts=np.zeros((0, *expert_shape), np.uint8),
        )

    @property
    def num_context(self) -> int:
        return len(self.request.token_ids)

    @property
    def most_tokens(self) -> int:
        """That its context may come to."""
        return self.num_context + self.max_tokens

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_context

    @property
    def generated(self) -> list[int]:
        return self.token_ids[self.num_context :]

    @property
    def spoken(self) -> list[int]:
        """What it has sampled, and what this turn had sampled before it was interrupted."""
        return self.token_ids[self.num_context - self.request.num_resumed :]

    @property
    def content(self) -> Content:
        """What is computed."""
        num = self.num_computed
        return Content(
            tokens=self.token_ids[:num], experts=self.experts[:num], weights=self.weights
        )

    @property
    def num_uncomputed(self) -> int:
        """Tokens still to forward: the context's, or after a preemption all of them again."""
        return len(self.token_ids) - self.num_computed

    def compute(self, start: int, experts: Experts, weights: Iterable[int]) -> None:
        """The tokens from `start` on have keys and values now."""
        if not len(self.experts):
            self.experts = np.zeros((self.most_tokens, *self.experts.shape[1:]), np.uint8)
        self.num_computed = start + len(experts)
        self.experts[start : self.num_computed] = experts
        self.weights[start:] = weights
        assert len(self.weights) == self.num_computed

    def compute_next(self, experts: Experts, weights: int) -> None:
        """The same of one more token, whose experts are [L, K]."""
        self.experts[self.num_computed] = experts
        self.weights.append(weights)
        self.num_computed += 1

    def draw(self) -> None:
        """A token was sampled from all that is computed."""
        self.num_drawn += 1
        self.num_settled = self.num_computed

    def append(self, drawn: Drawn, *, version: int, kv_version: int) -> None:
        """What was drawn is agreed."""
        self.token_ids.append(drawn.token)
        self.logprobs_raw.append(drawn.logprob_raw)
        self.logprobs.append(drawn.logprob)
        self.versions.append(version)
        self.kv_versions.append(kv_version)

    def finish(self, drawn: Drawn, text_of: Callable[[Tokens[int]], str]) -> str | None:
        """Why the turn ends with this token, its last, or None. `text_of` is asked only where stop
        strings are set."""
        params = self.request.sampling
        if drawn.token in params.stop_token_ids:
            return "stop"
        if drawn.ends_choice:
            return "choice"
        if params.stop_strings:
            text = text_of(self.spoken)
            if any(string in text for string in params.stop_strings):
                return "stop"
        return "length" if self.num_generated >= self.max_tokens else None

    def forget(self) -> int:
        """Its keys and values are gone, and what it has sampled stays; the number of rows."""
        self.sampled_experts.append(self._settled_since().copy())
        num, self.num_computed = self.num_computed, 0
        self.weights.clear()
        return num

    def _settled_since(self) -> Experts:
        """Of the settled tokens, the experts that are not among `sampled_experts`."""
        return self.experts[sum(map(len, self.sampled_experts)) : self.num_settled]

    def is_held(self, version: int) -> bool:
        """It has sampled all that it may before a version newer than this one is in use."""
        holds = self.request.holds
        if not holds:
            return False
        return any(num <= self.num_drawn and version < new for num, new in holds)

    def holds_reached(self, version: int) -> list[Held]:
        """Those it has come to while `version` is in use; it gets no other token before they are
        over, so to ask once behind each token is to hear of each hold once."""
        if not self.request.holds:
            return []
        sampled = self.num_generated
        return [
            Held(trajectory=self.request.trajectory, version=new)
            for num, new in self.request.holds
            if num <= sampled and version < new
        ]

    def result(self, finish: str) -> TurnResult:
        """The finished turn, with the experts the ledger does not have yet."""
        pieces = [*self.sampled_experts, self._settled_since()]
        experts = np.ascontiguousarray(np.concatenate(pieces)[self.request.experts_from :])
        num, layers, top_k = experts.shape
        return TurnResult(
            trajectory=self.request.trajectory,
            turn=self.request.turn,
            token_ids=self.generated,
            logprobs_raw=self.logprobs_raw,
            logprobs=self.logprobs,
            versions=self.versions,
            kv_versions=self.kv_versions,
            experts=experts.tobytes(),
            experts_shape=(num, layers, top_k),
            finish=finish,
            cached_tokens=self.num_cached,
            prefill_tokens=self.num_prefilled,
        )
