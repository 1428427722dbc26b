"""Every way the runtime may run one sequence: each returns all its logits and experts."""

from collections.abc import Callable, Sequence

import torch
from tests.moe.driving import Ranks, describe

from interlace.moe.description import Description
from interlace.moe.model import ForwardOutput

Way = Callable[[Ranks, Sequence[int]], ForwardOutput]


def whole(ranks: Ranks, tokens: Sequence[int]) -> ForwardOutput:
    return ranks.run(describe((tokens, 0, (4, 2, 7))))


def in_chunks(size: int) -> Way:
    def way(ranks: Ranks, tokens: Sequence[int]) -> ForwardOutput:
        starts = range(0, len(tokens), size)
        return joined(
            [
                ranks.run(*at_work(ranks, describe((tokens[a : a + size], a, (3, 0, 1))), a))
                for a in starts
            ]
        )

    return way


def decoded_beside_others(ranks: Ranks, tokens: Sequence[int]) -> ForwardOutput:
    """All but 20 tokens at once, then one by one beside a sequence of another length."""
    first = len(tokens) - 20
    mine, other = (5, 6, 1), (8, 2)
    outputs = [ranks.run(describe((tokens[:first], 0, mine)))]
    ranks.run(describe((tokens[:30], 0, other)))
    for at in range(first, len(tokens)):
        beside = 30 + at - first
        output = ranks.run(
            *at_work(
                ranks, describe((tokens[at : at + 1], at, mine), ([at % 50], beside, other)), at
            )
        )
        outputs.append(head(output, 1))
    return joined(outputs)


def mixed_with_a_prefill(ranks: Ranks, tokens: Sequence[int]) -> ForwardOutput:
    """Chunks of 40 rows, each in a batch with a decode row and another sequence's chunk."""
    outputs = []
    for at in range(0, len(tokens), 40):
        chunk = tokens[at : at + 40]
        output = ranks.run(
            describe((chunk, at, (9, 3, 2)), ([7], at, (0, 1, 4)), (tokens[:11], at, (5, 6, 7)))
        )
        outputs.append(head(output, len(chunk)))
    return joined(outputs)


def after_a_prefix_hit(ranks: Ranks, tokens: Sequence[int]) -> ForwardOutput:
    """Another sequence wrote the first 90 tokens; its whole block is shared, the part copied."""
    owner, shared = (4, 2, 7), 90
    before = ranks.run(describe(([*tokens[:shared], 9, 9, 9], 0, owner)))
    after = ranks.run(
        *at_work(ranks, describe((tokens[shared:], shared, (4, 5, 6)), block_copies=((2, 5),)), 3)
    )
    return joined([head(before, shared), after])


WAYS: dict[str, Way] = {
    "chunks of 7": in_chunks(7),
    "chunks of 33": in_chunks(33),
    "chunks of 64": in_chunks(64),
    "decoded beside others": decoded_beside_others,
    "mixed with a prefill": mixed_with_a_prefill,
    "after a prefix hit": after_a_prefix_hit,
}


def at_work(ranks: Ranks, description: Description, salt: int) -> list[Description]:
    """The description, and what other data-parallel ranks do meanwhile: sometimes nothing."""
    tokens = [(salt * 31 + i * 17) % 120 for i in range(salt % 5)]
    other = describe((tokens, 0, (11,))) if tokens else Description()
    return [description, *[other] * (len(ranks.groups["tp"]) - 1)]


def head(output: ForwardOutput, count: int) -> ForwardOutput:
    return ForwardOutput(logits_SV=output.logits_SV[:count], experts_TLK=output.experts_TLK[:count])


def joined(outputs: Sequence[ForwardOutput]) -> ForwardOutput:
    return ForwardOutput(
        logits_SV=torch.cat([o.logits_SV for o in outputs]),
        experts_TLK=torch.cat([o.experts_TLK for o in outputs]),
    )
