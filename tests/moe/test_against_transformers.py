"""Accuracy: as close to a float64 forward as transformers in float32, in every way of running."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tests.moe.driving import Ranks
from tests.moe.ways import WAYS, whole
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from interlace.moe.config import read_config
from interlace.moe.naive import NaiveOutput, naive_forward

TOKENS = [(i * i * 5 + 11 * i) % 160 for i in range(150)]
COMMON = {
    "vocab_size": 160,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "num_experts_per_tok": 2,
    "attn_implementation": "eager",
}
UNSURE = 1e-5
"""Below this gap in a router's probabilities two right programs may choose differently."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    folder: Path
    naive: NaiveOutput
    their_error: float
    sure: int
    """Positions before the first one whose routing another program may rightly change."""


def build(architecture: str, *, tie: bool = False) -> PreTrainedModel:
    torch.manual_seed(3)
    if architecture == "mixtral":
        config = MixtralConfig(
            intermediate_size=48,
            num_local_experts=8,
            sliding_window=None,
            tie_word_embeddings=tie,
            **COMMON,
        )
        return MixtralForCausalLM(config).eval()
    qwen = Qwen3MoeConfig(
        intermediate_size=96,
        moe_intermediate_size=48,
        num_experts=8,
        norm_topk_prob=architecture == "qwen3_moe",
        decoder_sparse_step=1,
        mlp_only_layers=[],
        tie_word_embeddings=tie,
        **COMMON,
    )
    return Qwen3MoeForCausalLM(qwen).eval()


def save_case(model: PreTrainedModel, folder: Path, *, stacked: bool, shards: str) -> Case:
    model.save_pretrained(folder, save_original_format=not stacked, max_shard_size=shards)
    with torch.inference_mode():
        theirs = model(torch.tensor([TOKENS])).logits[0].double()
    naive = naive_forward(folder, TOKENS)
    unsure = (naive.margin_T < UNSURE).nonzero()
    sure = int(unsure[0]) if len(unsure) else len(TOKENS)
    error = (theirs - naive.logits_TV)[:sure].abs().max().item()
    return Case(folder=folder, naive=naive, their_error=error, sure=sure)


@pytest.mark.slow
@pytest.mark.parametrize("stacked", [False, True], ids=["per expert", "stacked"])
@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe", "qwen3_moe, weights as they are"])
def test_error_is_at_most_twice_that_of_transformers(
    architecture: str, stacked: bool, tmp_path: Path
) -> None:
    case = save_case(build(architecture), tmp_path / "m", stacked=stacked, shards="5GB")
    assert case.sure > 100
    config = read_config(case.folder)
    for ranks in (
        Ranks(case.folder, config),
        Ranks(case.folder, config, world=2),
        Ranks(case.folder, config, world=2, tp_size=2),
    ):
        for name, way in ({"whole": whole} | WAYS).items():
            found = way(ranks, TOKENS)
            error = (found.logits_SV.double() - case.naive.logits_TV)[: case.sure].abs().max()
            assert error <= 2 * case.their_error, name
            agree = found.experts_TLK[: case.sure] == case.naive.experts_TLK[: case.sure]
            assert agree.all(), name


@pytest.mark.slow
def test_shards_and_tied_embeddings_load_as_transformers_writes_them(tmp_path: Path) -> None:
    case = save_case(build("mixtral", tie=True), tmp_path / "m", stacked=False, shards="300KB")
    assert (case.folder / "model.safetensors.index.json").exists()
    config = read_config(case.folder)
    assert config.tie_embeddings
    found = whole(Ranks(case.folder, config), TOKENS)
    error = (found.logits_SV.double() - case.naive.logits_TV)[: case.sure].abs().max()
    assert error <= 2 * case.their_error
