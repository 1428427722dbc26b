"""Accuracy: as close to a float64 forward as transformers in float32, in every way of running."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tests.moe.driving import Ranks
from tests.moe.their_models import THEIR_MODELS, VOCAB_SIZE, build
from tests.moe.ways import WAYS, whole
from transformers import AutoModelForCausalLM, PreTrainedModel

from interlace.moe.config import ARCHITECTURES, read_config
from interlace.moe.naive import NaiveOutput, naive_forward

TOKENS = [(i * i * 5 + 11 * i) % VOCAB_SIZE for i in range(150)]
UNSURE = 1e-5
"""Below this gap in a router's scores two right programs may choose differently."""
FLOAT32_ERROR = 1e-3
"""What float32 arithmetic of these models stays below; a wrong reference does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    folder: Path
    naive: NaiveOutput
    their_error: float
    sure: int
    """Positions before the first one whose routing another program may rightly change."""


def case_of(model: PreTrainedModel, folder: Path) -> Case:
    """`model` is what transformers makes of `folder`."""
    with torch.inference_mode():
        theirs = model(torch.tensor([TOKENS])).logits[0].double()
    naive = naive_forward(folder, TOKENS)
    unsure = (naive.margin_T < UNSURE).nonzero()
    sure = int(unsure[0]) if len(unsure) else len(TOKENS)
    error = (theirs - naive.logits_TV)[:sure].abs().max().item()
    assert error < FLOAT32_ERROR
    assert sure > 100
    return Case(folder=folder, naive=naive, their_error=error, sure=sure)


def save_case(model: PreTrainedModel, folder: Path, *, stacked: bool, shards: str = "5GB") -> Case:
    model.save_pretrained(folder, save_original_format=not stacked, max_shard_size=shards)
    return case_of(model, folder)


def check(case: Case, ranks: Ranks, *names: str) -> None:
    for name in names:
        found = ({"whole": whole} | WAYS)[name](ranks, TOKENS)
        error = (found.logits_SV.double() - case.naive.logits_TV)[: case.sure].abs().max()
        assert error <= 2 * case.their_error, name
        agree = found.experts_TLK[: case.sure] == case.naive.experts_TLK[: case.sure]
        assert agree.all(), name


@pytest.mark.slow
@pytest.mark.parametrize("name", THEIR_MODELS)
def test_error_is_at_most_twice_that_of_transformers(name: str, tmp_path: Path) -> None:
    case = save_case(build(name), tmp_path / "m", stacked=False)
    config = read_config(case.folder)
    check(case, Ranks(case.folder, config), "whole", *WAYS)
    for world, tp_size in ((2, 1), (2, 2), (4, 2)):
        ranks = Ranks(case.folder, config, world=world, tp_size=tp_size)
        check(case, ranks, "whole", "chunks of 33", "after a prefix hit")
        check(case, ranks, "decoded beside others")


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_experts_stacked_by_transformers_5_are_the_same_model(name: str, tmp_path: Path) -> None:
    model = build(name)
    model.save_pretrained(tmp_path / "hub", save_original_format=True)
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    outputs = [
        whole(Ranks(folder, read_config(folder)), TOKENS[:40])
        for folder in (tmp_path / "hub", tmp_path / "stacked")
    ]
    assert read_config(tmp_path / "hub") == read_config(tmp_path / "stacked")
    assert torch.equal(outputs[0].logits_SV, outputs[1].logits_SV)
    assert torch.equal(outputs[0].experts_TLK, outputs[1].experts_TLK)


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_transformers_runs_the_models_written_here(
    name: str, tiny_folders: dict[str, Path]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        tiny_folders[name], attn_implementation="eager", dtype=torch.float32
    )
    case = case_of(model.eval(), tiny_folders[name])
    check(case, Ranks(case.folder, read_config(case.folder)), "whole")


@pytest.mark.slow
def test_shards_and_tied_embeddings_load_as_transformers_writes_them(tmp_path: Path) -> None:
    model = build("mixtral", tie_word_embeddings=True)
    case = save_case(model, tmp_path / "m", stacked=False, shards="300KB")
    assert (case.folder / "model.safetensors.index.json").exists()
    config = read_config(case.folder)
    assert config.tie_embeddings
    check(case, Ranks(case.folder, config), "whole")
