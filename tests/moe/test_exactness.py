"""The promise: equal bits whatever the chunking, the batch, the cache and the ranks."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.moe.driving import Op, Ranks, describe, run_alone
from tests.moe.ways import WAYS, whole

from interlace.moe.config import ModelConfig
from interlace.moe.context import PathContext
from interlace.moe.description import Description
from interlace.moe.kv_cache import attention_planes
from interlace.moe.linear import Linear
from interlace.moe.model import Model
from interlace.moe.parts import Latent
from interlace.moe.placement import Placement
from interlace.moe.program import stub_result
from interlace.moe.selftest import exactness
from interlace.moe.weights import Weights, load_weights

DTYPES = (torch.float32, torch.bfloat16)
TOKENS = [(i * i * 7 + 13 * i) % 320 for i in range(150)]
SCATTERED = Placement(owners=(1, 0, 0, 1, 1, 0, 1, 0), ep_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_way_on_every_world_gives_the_bits_of_a_whole_prefill_on_one_rank(
    tiny: tuple[Path, ModelConfig], dtype: torch.dtype
) -> None:
    folder, config = tiny
    expected = whole(Ranks(folder, config, dtype=dtype), TOKENS)
    worlds = {
        "one rank": Ranks(folder, config, dtype=dtype),
        "two data-parallel": Ranks(folder, config, dtype=dtype, world=2),
        "two tensor-parallel": Ranks(folder, config, dtype=dtype, world=2, tp_size=2),
    }
    if config.num_experts:
        scattered = Ranks(folder, config, dtype=dtype, world=2, placement=SCATTERED)
        worlds["experts scattered"] = scattered
    for world, ranks in worlds.items():
        for name, way in ({"whole": whole} | WAYS).items():
            found = way(ranks, TOKENS)
            assert torch.equal(found.experts_TLK, expected.experts_TLK), (world, name)
            assert torch.equal(found.logits_SV, expected.logits_SV), (world, name)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_four_ranks_of_tensor_and_expert_parallelism_give_the_same_bits(
    tiny: tuple[Path, ModelConfig], dtype: torch.dtype
) -> None:
    folder, config = tiny
    expected = whole(Ranks(folder, config, dtype=dtype), TOKENS)
    for tp_size in (2, 4):
        ranks = Ranks(folder, config, dtype=dtype, world=4, tp_size=tp_size)
        found = WAYS["chunks of 33"](ranks, TOKENS)
        assert torch.equal(found.logits_SV, expected.logits_SV), tp_size
        assert torch.equal(found.experts_TLK, expected.experts_TLK), tp_size


@pytest.mark.parametrize("tp_size", [1, 2])
def test_the_program_is_the_same_for_any_rows_and_for_none(
    tiny: tuple[Path, ModelConfig], tp_size: int
) -> None:
    ranks = Ranks(*tiny, world=2, tp_size=tp_size)
    programs: list[list[Op]] = []
    for descriptions in (
        [Description()],
        [describe((TOKENS[:1], 0, (0,)))],
        [describe((TOKENS[:130], 0, (0, 1, 2)), ([5], 40, (4,)))],
    ):
        program: list[Op] = []
        ranks.run(*descriptions, program=program)
        programs.append(program)
    assert programs[0] == programs[1] == programs[2]
    stages = [stage for _, _, stage in programs[0]]
    assert len(set(stages)) == len(stages)
    roles = {role for _, role, _ in programs[0]}
    ep = {"ep"} if ranks.config.num_moe_layers else set()
    assert roles == (ep if tp_size == 1 else ep | {"tp"})


def test_the_empty_forward_on_stub_results_has_the_program_of_a_real_one(
    tiny: tuple[Path, ModelConfig],
) -> None:
    ranks = Ranks(*tiny, world=2, tp_size=2)
    real: list[Op] = []
    ranks.run(describe((TOKENS[:9], 0, (0,))), program=real)
    forward = ranks.model.forward(ranks.weights[1], ranks.contexts[1], Description())
    recorded: list[Op] = []
    answer = None
    while True:
        try:
            request = forward.send(answer)
        except StopIteration as stop:
            output = stop.value
            break
        recorded.append((type(request).__name__, request.role, request.stage))
        answer = stub_result(request, 2)
    assert recorded == real
    assert output.logits_SV.shape == (0, 320)
    assert output.experts_TLK.shape == (0, ranks.config.num_moe_layers, ranks.config.top_k)


def test_forward_refuses_weights_of_another_place(tiny: tuple[Path, ModelConfig]) -> None:
    ranks = Ranks(*tiny, world=2)
    if ranks.config.num_experts:
        with pytest.raises(ValueError, match="places experts"):
            run_alone(ranks.model.forward(ranks.weights[0], ranks.contexts[1], Description()))
    sharded = Ranks(*tiny, world=2, tp_size=2)
    with pytest.raises(ValueError, match="tensor-parallel rank 1 of 2"):
        run_alone(ranks.model.forward(sharded.weights[0], sharded.contexts[1], Description()))


def test_forward_refuses_positions_the_model_does_not_have(
    tiny: tuple[Path, ModelConfig],
) -> None:
    with pytest.raises(ValueError, match="at position 2048, the model has 2048 positions"):
        Ranks(*tiny).run(describe(([1], 2048, range(33))))


def test_tensor_parallelism_that_splits_a_head_is_refused(
    tiny: tuple[Path, ModelConfig],
) -> None:
    folder, config = tiny
    latent = isinstance(config.attention, Latent)
    heads = "8 query heads" if latent else "4 key/value heads"
    with pytest.raises(ValueError, match=f"tensor parallelism of 3 cannot divide {heads}"):
        load_weights(folder, config, expert_ids=(0,), dtype=torch.float32, tp_size=3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tp_size", "ep_size"), [(1, 1), (1, 2), (2, 2), (4, 4)])
def test_the_self_test_finds_this_machine_exact(
    tiny: tuple[Path, ModelConfig], dtype: torch.dtype, tp_size: int, ep_size: int
) -> None:
    model, weights, placement = shard(tiny, dtype, tp_size, ep_size)
    with torch.inference_mode():
        report = exactness(model, weights, placement=placement, ep_rank=ep_size - 1)
    assert report.exact, report


class BatchDependent:
    """A product that changes with the number of its rows, as careless kernels do."""

    own = None

    def __init__(self, linear: Linear) -> None:
        self._linear = linear

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        return self._linear(x_TK) * (1 + 1e-6 * len(x_TK))


def test_the_self_test_reports_a_kernel_that_depends_on_the_batch(
    tiny: tuple[Path, ModelConfig],
) -> None:
    model, weights, placement = shard(tiny, torch.float32, 1, 1)
    first = weights.layers[0]
    broken = replace(first, o=BatchDependent(first.o))  # type: ignore[arg-type]
    weights = replace(weights, layers=(broken, *weights.layers[1:]))
    with torch.inference_mode():
        report = exactness(model, weights, placement=placement)
    assert report.differing == ("chunks of 7", "decoded beside another")
    assert not report.exact


def shard(
    tiny: tuple[Path, ModelConfig], dtype: torch.dtype, tp_size: int, ep_size: int
) -> tuple[Model, Weights, Placement]:
    """The last rank's weights."""
    folder, config = tiny
    placement = Placement.contiguous(config.num_experts, ep_size)
    weights = load_weights(
        folder,
        config,
        expert_ids=placement.experts_of(ep_size - 1),
        dtype=dtype,
        tp_rank=tp_size - 1,
        tp_size=tp_size,
    )
    return Model(config), weights, placement


def test_nothing_is_written_by_an_empty_forward(tiny: tuple[Path, ModelConfig]) -> None:
    ranks = Ranks(*tiny)
    ranks.run(Description())
    context: PathContext = ranks.contexts[0]
    names = attention_planes(ranks.config)
    layers = range(ranks.config.num_layers)
    assert not any(context.kv.plane(layer, name).any() for layer in layers for name in names)
