"""Weights that change under a whole rollout: every bit is accounted for, in every mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import astuple, replace
from safetensors.torch import load_file, save_file
from tests.rollout.updated_ranks import Asked, Folders, Job, Reference, experts_of

from interlace.moe.random_model import write_random_model
from interlace.rollout import load_config
from interlace.rollout.holdings import Holdings
from interlace.rollout.messages import TurnRequest, TurnResult, UpdateMode
from interlace.rollout.prefill_side import PrefillSide
from interlace.rollout.scheduler import Scheduler
from interlace.rollout.sequence import Sequence as Turn

pytestmark = pytest.mark.slow

WAYS: dict[str, tuple[str, ...]] = {
    "serial": ("mode=serial", "layout.world=2"),
    "chunked": ("mode=chunked", "layout.world=2"),
    "whole_forward": ("mode=whole_forward", "layout.world=2"),
    "multiplexed": ("mode=multiplexed", "layout.world=2"),
    "disaggregated": ("mode=disaggregated", "layout.world=2"),
    "by heads": ("mode=multiplexed", "layout.world=2", "layout.tp=2"),
    "disaggregated by heads": ("mode=disaggregated", "layout.world=4", "layout.tp=2"),
}
PROMPT = [3 + (7 * at) % 250 for at in range(75)]
EPISODES = {
    number: [
        Asked(tokens=[*PROMPT[: 40 + 9 * number], 5 + number], num=9),
        Asked(tokens=[60 + number, 61, 62], num=7),
    ]
    for number in range(4)
}
POSITIONS = {1: {0: 4, 1: 9, 2: 0, 3: 10}, 2: {0: 12, 1: 13, 2: 9, 3: 16}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("versions")
    return {v: write_random_model(root / str(v), "qwen3_moe", v) for v in range(3)}


@pytest.fixture(scope="module")
def reference(folders: Folders) -> Reference:
    return Reference(folders)


def job(way: str, folders: Folders, *overrides: str, **rest: Any) -> Job:
    config = load_config(
        preset="tiny",
        overrides=(
            "scheduler.chunk_tokens=20",
            "scheduler.num_blocks=64",
            "launch.serial_device_slots=1",
            *WAYS[way],
            *overrides,
        ),
    )
    return Job(config, folders, rest.pop("episodes", EPISODES), **rest)


def bits(done: Sequence[tuple[TurnRequest, TurnResult]]) -> list[tuple[Any, ...]]:
    """Of each turn, all that does not depend on when it was prefilled."""
    alike = (replace(r, cached_tokens=0, prefill_tokens=0) for _, r in done)
    return [astuple(result) for result in alike]


def sampled(done: Sequence[tuple[TurnRequest, TurnResult]], number: int) -> list[int]:
    return [v for _, r in done if r.trajectory == number for v in r.versions]


@pytest.mark.parametrize("mode", ["keep", "retract"])
@pytest.mark.parametrize("way", WAYS)
def test_updates_at_token_positions_give_the_same_bits_in_every_mode(
    way: str, mode: UpdateMode, folders: Folders, reference: Reference
) -> None:
    planned = job(
        way, folders, f"launch.interleaving_seed={len(way)}", mode=mode, positions=POSITIONS
    )
    done = planned.play()
    for version, found in POSITIONS.items():
        for number, position in found.items():
            assert sum(old < version for old in sampled(done, number)) == position
    for request, result in done:
        reference.check(request, result, mode)
    steps = {tuple(updates.installed_at) for updates in planned.updates}
    assert len(steps) == 1, "every rank in the same step"


@pytest.mark.parametrize("mode", ["keep", "retract"])
@pytest.mark.parametrize("way", ["chunked", "multiplexed", "disaggregated by heads"])
def test_updates_at_any_step_are_accounted_for_to_the_bit(
    way: str, mode: UpdateMode, folders: Folders, reference: Reference
) -> None:
    """A run whose weights changed at any time is what its own versions say, and nothing else."""
    seen = set()
    for first in (3, 8):
        free = job(way, folders, mode=mode, at={first: 1, first + 9: 2})
        for request, result in free.play():
            reference.check(request, result, mode)
            assert result.versions == sorted(result.versions)
            seen |= set(zip(result.versions, result.kv_versions, strict=True))
    assert {new for new, _ in seen} >= {0, 1, 2}
    assert any(new > old for new, old in seen) == (mode == "keep")


def test_what_was_recorded_can_be_played_again(folders: Folders) -> None:
    done = job("multiplexed", folders, at={5: 1, 14: 2}).play()
    positions = {
        version: {
            number: sum(old < version for old in sampled(done, number)) for number in EPISODES
        }
        for version in (1, 2)
    }
    for way in ("serial", "disaggregated"):
        assert bits(job(way, folders, positions=positions).play()) == bits(done)


def test_an_aborting_update_gives_back_what_there_is(
    folders: Folders, reference: Reference
) -> None:
    episodes = {number: [Asked(tokens=PROMPT[: 30 + number], num=40)] for number in range(3)}
    ended = job("multiplexed", folders, episodes=episodes, mode="abort", at={20: 1})
    done = ended.play()
    assert {result.finish for _, result in done} == {"aborted"}
    assert all(0 < len(result.token_ids) < 40 for _, result in done)
    told = [number for updates in ended.updates for c in updates.changes for number in c.aborted]
    assert sorted(told) == [0, 1, 2]
    for request, result in done:
        reference.check(request, result, "keep")


@pytest.mark.parametrize("mode", ["keep", "retract", "same"])
@pytest.mark.parametrize("way", ["multiplexed", "disaggregated"])
def test_ranks_update_while_nothing_runs(way: str, mode: UpdateMode, folders: Folders) -> None:
    episodes = {0: [Asked(tokens=PROMPT, num=3)]}
    idle = job(way, folders, episodes=episodes, mode=mode, positions={1: {}, 2: {0: 3}})
    done = idle.play()
    assert sampled(done, 0) == [1, 1, 1]
    assert [v for v, _ in idle.updates[0].installed_at][:1] == [1]


def test_a_small_pool_gives_true_versions_though_not_the_same_bits(folders: Folders) -> None:
    episodes = {number: [Asked(tokens=PROMPT[:50], num=90)] for number in range(3)}
    at = {40: 1, 90: 2}
    scarce = job("multiplexed", folders, "layout.world=1", episodes=episodes, at=at, num_blocks=4)
    done = scarce.play()
    assert scarce.ranks[0].engine.part.num_preemptions > 0
    for _, result in done:
        assert len(result.token_ids) == 90
        assert result.versions == sorted(result.versions)
        assert result.kv_versions == sorted(result.kv_versions)
        assert all(o <= n for o, n in zip(result.kv_versions, result.versions, strict=True))


# ---- routing


def with_equal_experts(folder: Path, seed: int, router: int) -> Path:
    """A model whose experts are copies of one another: its router may change, its text does not."""
    write_random_model(folder, "mixtral", seed)
    path = folder / "model.safetensors"
    tensors: dict[str, torch.Tensor] = load_file(path)
    draw = torch.Generator().manual_seed(router)
    for name, tensor in list(tensors.items()):
        if ".experts." in name:
            tail = name.split(".experts.")[1].partition(".")[2]
            tensors[name] = tensors[name.split(".experts.")[0] + f".experts.0.{tail}"].clone()
        elif name.endswith(".gate.weight"):
            tensors[name] = torch.randn(tensor.shape, generator=draw) * 0.3
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def routers(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("routers")
    return {v: with_equal_experts(root / str(v), 5, router=v) for v in range(3)}


def greedy(folders: Mapping[int, Path], way: str, **rest: Any) -> list[TurnResult]:
    return [result for _, result in job(way, folders, temperature=0.0, **rest).play()]


@pytest.mark.parametrize("way", ["multiplexed", "disaggregated"])
def test_routing_stays_as_sampled_where_only_the_router_changes(way: str, routers: Folders) -> None:
    """Through retract, a second turn and hits of the prefix tree."""
    positions = {1: {0: 4, 1: 9, 2: 0, 3: 10}}
    retracted = greedy(routers, way, positions=positions, mode="retract")
    old = greedy({0: routers[0], 1: routers[1]}, way)
    new = greedy({0: routers[1], 1: routers[0]}, way)
    differing = 0
    for result, before, after in zip(retracted, old, new, strict=True):
        assert result.token_ids == before.token_ids == after.token_ids
        start = len(result.token_ids) - 1
        routed = experts_of(result)
        num_old = sum(version == 0 for version in result.versions)
        settled = len(routed) - start + num_old - 1 if num_old else 0
        assert (routed[:settled] == experts_of(before)[:settled]).all()
        assert (routed[settled:] == experts_of(after)[settled:]).all()
        differing += int((experts_of(before) != experts_of(after)).any(axis=(1, 2)).sum())
    assert differing > 100, "the routers differ, or this shows nothing"


def test_twins_find_each_others_routing_in_the_prefix_tree(routers: Folders) -> None:
    episodes = {number: [Asked(tokens=PROMPT, num=4)] for number in range(4)}
    positions = {1: dict.fromkeys(episodes, 2)}
    results = greedy(routers, "multiplexed", episodes=episodes, positions=positions, mode="retract")
    assert len({result.experts for result in results}) == 1
    assert sum(result.cached_tokens > 0 for result in results) >= 2


# ---- every rule is needed


def overwrites(sequence: Turn) -> int:
    num, sequence.num_computed = sequence.num_computed, 0
    sequence.weights.clear()
    return num


def keeps_prefills(holdings: Holdings, sequence: Turn) -> bool:
    return False


def finds_old(scheduler: Scheduler, version: int, *, same: bool) -> None:
    scheduler.kv.install(version, same=same)


def goes_on(side: PrefillSide, version: int, mode: UpdateMode) -> Any:
    return side._scheduler.updated(version, mode)


CARELESS: dict[str, tuple[str, UpdateMode, type, str, Any]] = {
    "experts are overwritten": ("multiplexed", "retract", Turn, "forget", overwrites),
    "prefills go on": ("multiplexed", "keep", Holdings, "is_outdated", keeps_prefills),
    "nothing is retracted": ("multiplexed", "retract", Holdings, "is_outdated", keeps_prefills),
    "new turns find old keys": ("multiplexed", "keep", Scheduler, "install", finds_old),
    "who prefills goes on": ("disaggregated", "keep", PrefillSide, "updated", goes_on),
}


@pytest.mark.parametrize("name", CARELESS)
def test_without_a_rule_some_bit_is_wrong(
    name: str, folders: Folders, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    way, mode, *patch = CARELESS[name]
    monkeypatch.setattr(*patch)

    def check_runs() -> None:
        for first in range(2, 14, 2):
            for request, result in job(way, folders, mode=mode, at={first: 1, first + 9: 2}).play():
                reference.check(request, result, mode)

    with pytest.raises(AssertionError):
        check_runs()


def test_without_holds_weights_change_at_other_tokens(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Turn, "is_held", lambda sequence, version: False)
    done = job("multiplexed", folders, positions=POSITIONS).play()
    assert any(
        sum(old < version for old in sampled(done, number)) != position
        for version, found in POSITIONS.items()
        for number, position in found.items()
    )
