"""What exactness is compared with is the same model, and the comparison is reported whole."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from interlace.experiments import exactness_price
from interlace.experiments.exactness.exact import Exact
from interlace.experiments.exactness.loose import Loose
from interlace.experiments.exactness.price import PARTS, by_turns, prices
from interlace.experiments.exactness.shape import Shape
from interlace.experiments.exactness.ways import Ways
from interlace.moe import kernels
from interlace.moe.config import read_config
from interlace.moe.random_model import write_random_model

pytestmark = pytest.mark.skipif(not kernels.instructions(), reason="there are no kernels here")

SHAPES = (
    Shape(sequences=3, start=70, rows=1),
    Shape(sequences=1, start=0, rows=40),
    Shape(sequences=2, start=5, rows=9),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(
        tmp_path_factory.mktemp("price") / "model",
        "qwen3_moe",
        1,
        num_layers=2,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        num_experts=4,
        top_k=2,
        expert_size=64,
        vocab_size=512,
        dtype="bfloat16",
    )


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_every_way_that_keeps_no_bits_computes_the_same_model(folder: Path, shape: Shape) -> None:
    with torch.inference_mode():
        torch.manual_seed(0)
        exact = Exact(folder, read_config(folder), shape.sequences * shape.blocks_each)
        loose = Loose(folder, exact)
        batch, description = loose.batch(shape), shape.description(512)
        logits = exact.forward(description)
        assert torch.equal(batch.forward(Ways(), description), logits), "the plain loop is exact"
        expected = logits.log_softmax(-1)
        names = {
            "products": list(loose.layers[0].qkv),
            "head": list(loose.head),
            "attention": batch.attention_names(),
            "experts": loose.layers[0].experts.names(),
        }
        for part, ways in names.items():
            for way in ways:
                found = batch.forward(replace(Ways(), **{part: way}), description)
                apart = (found.log_softmax(-1) - expected).abs().mean()
                assert apart < 0.02, f"{part} by {way} are {apart} from the exact ones"


def test_each_work_has_one_turn_in_every_round() -> None:
    order: list[str] = []
    turns = by_turns([lambda: order.append("a"), lambda: order.append("b")], 3)
    assert [len(taken) for taken in turns] == [3, 3]
    assert {"a", "b"} == {*order}


@pytest.mark.slow
def test_a_price_tells_of_every_part_how_it_was_done_and_how_far_apart(folder: Path) -> None:
    said: list[dict[str, Any]] = []
    prices(str(folder), SHAPES[:1], 2, said.append)
    ceilings, found = said
    assert ceilings["bytes"] > 0
    assert found["shape"] == "decode 3 behind 70"
    assert list(found["parts"]) == [*PARTS]
    for part in found["parts"].values():
        assert part["framed_ms"] > 0
        assert part["framed_to_best"]["pairs"] == part["plain_to_best"]["pairs"] == 2
    assert found["mean_logprob_difference"] < 0.02


@pytest.mark.processes
@pytest.mark.slow
def test_the_command_measures_each_instruction_set_in_a_process_of_its_own(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exactness_price, "SHAPES", SHAPES[:1])
    app = typer.Typer()
    app.command()(exactness_price.main)
    done = CliRunner().invoke(
        app, ["--out", str(tmp_path), "--model", str(folder), "--rounds", "2"]
    )
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "exactness_price.json").read_text())
    assert list(found["instructions"]) == exactness_price.instruction_sets()
    for one in found["instructions"].values():
        assert [row["shape"] for row in one["prices"]] == ["decode 3 behind 70"]


def test_a_shape_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(exactness_price.main)
    done = CliRunner().invoke(app, ["--out", str(tmp_path), "--only", "decode 2"])
    assert done.exit_code == 2
    assert "there is no shape" in done.output
