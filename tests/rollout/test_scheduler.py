from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.moe.description import Description
from interlace.moe.sampling_params import SamplingParams
from interlace.rollout.block_manager import BlockManager
from interlace.rollout.messages import TurnRequest, TurnResult
from interlace.rollout.scheduler import Scheduler
from interlace.rollout.sequence import Drawn

SIZE = 4
STOP = 9


def scheduler(
    *, blocks: int = 16, chunk: int = 8, running: int = 4, context: int = 40
) -> Scheduler:
    return Scheduler(
        blocks=BlockManager(num_blocks=blocks, block_size=SIZE),
        chunk_tokens=chunk,
        max_running=running,
        max_context=context,
        expert_shape=(1, 1),
        text_of=lambda ids: "".join(chr(97 + token % 26) for token in ids),
    )


def request(trajectory: int, tokens: Sequence[int], **sampling: object) -> TurnRequest:
    params = {"max_tokens": 3, "stop_token_ids": (STOP,), **sampling}
    return TurnRequest(
        trajectory=trajectory,
        turn=0,
        token_ids=list(tokens),
        seed=0,
        experts_from=0,
        sampling=SamplingParams(**params),  # type: ignore[arg-type]
    )


def experts(description: Description) -> np.ndarray:
    """Each row is routed to its own token, so a misplaced row shows in the ledger."""
    return np.array(description.input_ids, np.uint8).reshape(-1, 1, 1)


def take(s: Scheduler, work: str, description: Description, token: int = 1) -> None:
    drawn = [
        Drawn(token=token, logprob_raw=-1.0, logprob=-0.5, ends_choice=False)
        for _ in description.sample_rows
    ]
    s.take(work, drawn, experts(description), 0)


def run(s: Scheduler, *, steps: int = 200) -> list[TurnResult]:
    """Steps as an engine of one rank would, prefill and decode in each."""
    results = []
    for _ in range(steps):
        proposal = s.propose(rank=0, hashes=())
        results += s.commit()
        if proposal.idle:
            break
        if proposal.decode_rows:
            decode = s.describe_decode()
        prefill = s.describe_prefill() if proposal.waiting_tokens else None
        if proposal.decode_rows:
            take(s, "decode", decode)
        if prefill is not None:
            assert prefill.num_rows, "a proposed prefill must have rows"
            take(s, "prefill", prefill)
        s.blocks.check_integrity()
    return results


def test_a_chunk_never_exceeds_its_tokens_and_long_contexts_take_several() -> None:
    s = scheduler(chunk=8)
    s.submit(request(0, range(20)))
    sizes = []
    while s.propose(rank=0, hashes=()).waiting_tokens:
        description = s.describe_prefill()
        sizes.append(description.num_rows)
        assert bool(description.sample_rows) == (sum(sizes) == 20)
        take(s, "prefill", description)
        s.commit()
    assert sizes == [8, 8, 4]


def test_results_are_provisional_until_committed() -> None:
    s = scheduler()
    s.submit(request(0, [1, 2], max_tokens=1))
    take(s, "prefill", s.describe_prefill())
    proposal = s.propose(rank=0, hashes=())
    assert proposal.decode_rows == 1, "an upper bound: it may have stopped"
    assert not proposal.idle
    (result,) = s.commit()
    assert result.finish == "length"
    assert s.propose(rank=0, hashes=()).idle


@pytest.mark.parametrize(
    ("sampling", "token", "finish"),
    [
        ({}, STOP, "stop"),
        ({"max_tokens": 1}, 1, "length"),
        ({"stop_strings": ("b",), "max_tokens": 5}, 1, "stop"),
    ],
)
def test_what_ends_a_turn(sampling: dict[str, object], token: int, finish: str) -> None:
    s = scheduler()
    s.submit(request(0, [1, 2], **sampling))
    take(s, "prefill", s.describe_prefill(), token)
    assert [result.finish for result in s.commit()] == [finish]


def test_the_experts_of_a_turn_are_those_of_its_tokens() -> None:
    s = scheduler()
    s.submit(request(0, range(1, 12)))
    (result,) = run(s)
    num, layers, top_k = result.experts_shape
    assert (layers, top_k) == (1, 1)
    context = [*range(1, 12), *result.token_ids]
    assert list(result.experts) == context[:num], "all but the last sampled token was forwarded"
    assert num == len(context) - 1


def test_a_second_turn_is_cached_up_to_its_last_token() -> None:
    s = scheduler()
    s.submit(request(0, range(1, 12)))
    (first,) = run(s)
    context = [*range(1, 12), *first.token_ids, 5, 6]
    s.submit(request(0, context))
    (second,) = run(s)
    assert second.cached_tokens == 11 + len(first.token_ids) - 1
    assert second.prefill_tokens == len(context) - second.cached_tokens
    assert list(second.experts)[: len(context)] == context


def test_twins_of_one_chunk_compute_their_common_blocks_once() -> None:
    s = scheduler(chunk=64)
    for trajectory in range(3):
        s.submit(request(trajectory, range(1, 14)))
    first = s.describe_prefill()
    assert first.num_rows == 13, "only one of the three goes first"
    take(s, "prefill", first)
    results = run(s)
    assert sorted(result.cached_tokens for result in results) == [0, 12, 12]
    assert len({tuple(result.experts) for result in results}) == 1


def test_an_aborted_turn_in_flight_ends_when_its_chunk_returns() -> None:
    s = scheduler()
    s.submit(request(0, [1, 2, 3]))
    description = s.describe_prefill()
    s.abort(0)
    assert s.propose(rank=0, hashes=()).live_rows == 0
    assert s.commit() == []
    take(s, "prefill", description)
    (result,) = s.commit()
    assert (result.finish, result.token_ids) == ("aborted", [])
    s.blocks.check_integrity()


def test_a_dropped_chunk_was_never_computed() -> None:
    s = scheduler()
    s.submit(request(0, [1, 2, 3]))
    s.describe_prefill()
    s.abort(0)
    s.drop_prefill()
    (result,) = s.commit()
    assert (result.finish, result.experts_shape[0]) == ("aborted", 0)
    s.blocks.check_integrity()


def test_a_dropped_chunk_is_not_begun_again_before_those_behind_it() -> None:
    s = scheduler(chunk=2)
    s.submit(request(0, range(2)))
    s.submit(request(1, range(10, 12)))
    s.describe_prefill()
    s.abort(0)
    assert s.propose(rank=0, hashes=()).live_rows == 0
    s.commit()
    s.drop_prefill()
    assert s.describe_prefill().input_ids == (10, 11)
    (result,) = s.commit()
    assert (result.trajectory, result.finish) == (0, "aborted")


def test_an_aborted_turn_that_waits_asks_for_no_prefill() -> None:
    s = scheduler()
    s.submit(request(0, range(2)))
    s.abort(0)
    assert s.propose(rank=0, hashes=()).waiting_tokens == 0


def test_an_aborted_running_turn_keeps_its_tokens() -> None:
    s = scheduler()
    s.submit(request(0, [1, 2, 3], max_tokens=10))
    take(s, "prefill", s.describe_prefill())
    s.commit()
    take(s, "decode", s.describe_decode())
    s.abort(0)
    (result,) = s.commit()
    assert (result.finish, result.token_ids) == ("aborted", [1, 1])


def test_what_can_never_fit_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"41 context tokens .* 1 to 40"):
        scheduler().submit(request(0, range(41)))
    with pytest.raises(ValueError, match="23 tokens need 6 blocks, the pool has 5"):
        scheduler(blocks=5).submit(request(0, range(20)))


def test_the_last_room_of_the_context_is_used() -> None:
    s = scheduler(context=12)
    s.submit(request(0, range(11), max_tokens=30))
    (result,) = run(s)
    assert len(result.token_ids) == 1


def test_the_last_to_come_gives_way_and_ends_up_with_the_same_tokens() -> None:
    def played(blocks: int) -> tuple[list[TurnResult], int]:
        s = scheduler(blocks=blocks, chunk=64, running=3)
        for trajectory in range(3):
            s.submit(request(trajectory, [50 + trajectory, 1, 2, 3], max_tokens=16))
        results = run(s)
        return sorted(results, key=lambda result: result.trajectory), s.num_preemptions

    roomy, none = played(20)
    scarce, some = played(7)
    assert none == 0
    assert some > 0
    for one, other in zip(roomy, scarce, strict=True):
        assert (one.token_ids, one.experts) == (other.token_ids, other.experts)
    assert scarce[0].prefill_tokens == 4, "who came first was never preempted"


def test_blocks_are_spared_for_those_that_run() -> None:
    s = scheduler(blocks=6, chunk=64, running=4)
    s.submit(request(0, range(1, 8), max_tokens=10))
    take(s, "prefill", s.describe_prefill())
    s.propose(rank=0, hashes=())
    s.commit()
    s.submit(request(1, range(30, 45)))
    assert s.propose(rank=0, hashes=()).waiting_tokens == 0, "4 blocks, and one may be needed"


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    chunk=st.integers(1, 20),
    blocks=st.integers(10, 30),
    running=st.integers(1, 5),
    max_tokens=st.integers(1, 10),
    shared=st.booleans(),
)
def test_every_turn_ends_once_however_scarce_blocks_are(
    lengths: list[int], chunk: int, blocks: int, running: int, max_tokens: int, shared: bool
) -> None:
    s = scheduler(blocks=blocks, chunk=chunk, running=running)
    contexts = []
    for trajectory, length in enumerate(lengths):
        first = 0 if shared else 40 + trajectory
        contexts.append([first, *range(1, length)])
        s.submit(request(trajectory, contexts[-1], max_tokens=max_tokens))
    results = run(s, steps=2000)
    assert sorted(result.trajectory for result in results) == list(range(len(lengths)))
    for result in results:
        context = [*contexts[result.trajectory], *result.token_ids]
        assert list(result.experts) == context[:-1]
    assert s.propose(rank=0, hashes=()).idle
