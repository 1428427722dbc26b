"""Whatever the two paths' strategies are, the numbers of a rollout are the same."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import get_args

import pytest

from interlace.moe.dispatch_strategy import Strategy
from interlace.rollout import Rollout, RolloutConfig, load_config
from interlace.rollout.batching import max_rows
from interlace.rollout.config import Dispatch
from interlace.rollout.digest import digest
from interlace.rollout.figures import figures

STRATEGIES = get_args(Strategy)
PAIRS = list(itertools.product(STRATEGIES, STRATEGIES))
COLLECTIVES = {"all_to_all": 3, "fixed": 2, "gather": 2}
SPLIT_COLLECTIVES = {"all_to_all": 5, "fixed": 4, "gather": 4, "replicated": 2}
"""The same where attention is split over the ranks; those at a pass's end are left out."""
SPLIT_AT_END = {"all_to_all": 3, "fixed": 3, "gather": 3, "replicated": 1}
NUM_LAYERS = 4


def configured(*overrides: str) -> RolloutConfig:
    small = (
        "sampling.max_tokens=6",
        "scheduler.chunk_tokens=24",
        "environments.num_processes=1",
    )
    return load_config(preset="tiny", overrides=(*small, *overrides))


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    digest: str
    coexisting: float
    decode_tickets: set[int]
    """How many a step has, where it has any."""


def played(*overrides: str) -> Played:
    config = configured(*overrides)
    with Rollout(config) as rollout:
        trajectories = list(rollout.run(config.expand_tasks()))
    steps, _ = rollout.records[0]
    return Played(
        digest=digest(trajectories),
        coexisting=figures(rollout.records).coexisting_steps_share,
        decode_tickets={dict(step.num_tickets).get("decode", 0) for step in steps} - {0},
    )


@pytest.fixture(scope="module")
def reference() -> str:
    return played("mode=serial", "layout.world=1").digest


@pytest.mark.slow
@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
def test_one_digest_whatever_the_strategies(prefill: str, decode: str, reference: str) -> None:
    tp = 2 if "replicated" in (prefill, decode) else 1
    found = played(
        "layout.world=2",
        f"layout.tp={tp}",
        "launch.serial_device_slots=2",
        f"launch.interleaving_seed={PAIRS.index((prefill, decode))}",
        f"dispatch.prefill={prefill}",
        f"dispatch.decode={decode}",
    )
    assert found.digest == reference
    assert found.coexisting > 0.3
    if tp == 1:
        assert found.decode_tickets == {NUM_LAYERS * COLLECTIVES[decode]}
    else:
        num = NUM_LAYERS * SPLIT_COLLECTIVES[decode] + SPLIT_AT_END[decode]
        assert found.decode_tickets == {num}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "prefill", "decode"),
    [
        ("serial", "gather", "fixed"),
        ("whole_forward", "fixed", "gather"),
        ("chunked", "fixed", "all_to_all"),
        ("chunked", "gather", "all_to_all"),
    ],
)
def test_one_digest_in_the_other_modes(
    mode: str, prefill: str, decode: str, reference: str
) -> None:
    overrides = (f"mode={mode}", f"dispatch.prefill={prefill}", f"dispatch.decode={decode}")
    assert played("layout.world=2", *overrides).digest == reference


@pytest.mark.slow
@pytest.mark.parametrize(("prefill", "decode"), [("gather", "fixed"), ("fixed", "gather")])
def test_one_digest_where_ranks_share_the_rows_of_a_group(
    prefill: str, decode: str, reference: str
) -> None:
    overrides = (f"dispatch.prefill={prefill}", f"dispatch.decode={decode}")
    assert played("layout.world=4", "layout.tp=2", *overrides).digest == reference


def test_a_path_of_mixed_work_follows_prefill_and_its_bound_covers_both() -> None:
    dispatch = Dispatch(prefill="gather", decode="fixed")
    assert dispatch.of(("decode",)) == "fixed"
    assert dispatch.of(("prefill",)) == "gather"
    assert dispatch.of(("decode", "prefill")) == "gather"
    assert max_rows(("decode",), decoding=3, chunk_tokens=64) == 3
    assert max_rows(("prefill",), decoding=3, chunk_tokens=64) == 64
    assert max_rows(("decode", "prefill"), decoding=3, chunk_tokens=64) == 67


def test_an_unknown_strategy_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"(?s)dispatch.decode.*'fixed', 'gather' or 'repl"):
        configured("dispatch.decode=broadcast")


def test_replicated_rows_are_of_one_group() -> None:
    with pytest.raises(ValueError, match=r"(?s)dispatch.prefill=replicated needs the 4 ranks"):
        configured("dispatch.prefill=replicated", "layout.world=4", "layout.tp=2")
