"""In the last layer experts are only for the rows that are asked for, and no bit is another."""

from pathlib import Path

import pytest
import torch
from tests.moe.driving import Ranks, describe

from interlace.moe.config import read_config
from interlace.moe.description import Description
from interlace.moe.dispatch_strategy import Strategy
from interlace.moe.model import ForwardOutput

TOKENS = [(i * i * 7 + 13 * i) % 320 for i in range(90)]


def asked(description: Description, rows: tuple[int, ...]) -> Description:
    return Description(
        input_ids=description.input_ids,
        positions=description.positions,
        cu_seqlens_q=description.cu_seqlens_q,
        block_tables=description.block_tables,
        sample_rows=rows,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("dispatch", "world", "tp_size"),
    [
        ("all_to_all", 1, 1),
        ("all_to_all", 2, 1),
        ("all_to_all", 2, 2),
        ("gather", 4, 2),
        ("fixed", 2, 2),
        ("replicated", 2, 2),
    ],
)
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "qwen2_moe"])
def test_rows_that_are_asked_for_have_the_bits_they_have_among_all(
    tiny_folders: dict[str, Path],
    name: str,
    dispatch: Strategy,
    world: int,
    tp_size: int,
    dtype: torch.dtype,
) -> None:
    config = read_config(tiny_folders[name])

    def run(rows: tuple[int, ...]) -> ForwardOutput:
        """A prompt, then a token of it beside a prompt of another."""
        ranks = Ranks(
            tiny_folders[name],
            config,
            dtype=dtype,
            world=world,
            tp_size=tp_size,
            dispatch=dispatch,
        )
        whole = describe((TOKENS, 0, (4, 2)))
        ranks.run(asked(whole, rows))
        return ranks.run(asked(describe((TOKENS[:1], 90, (4, 2)), (TOKENS[:40], 0, (1,))), rows))

    everything = run(tuple(range(41)))
    for rows in ((0, 40, 40), (40,), (17, 3), ()):
        found = run(rows)
        assert torch.equal(found.logits_SV, everything.logits_SV[list(rows)])
        assert torch.equal(found.experts_TLK, everything.experts_TLK)


def test_experts_of_the_last_layer_get_no_rows_that_nobody_asks_for(
    tiny_folders: dict[str, Path],
) -> None:
    config = read_config(tiny_folders["qwen3_moe"])
    ranks = Ranks(tiny_folders["qwen3_moe"], config)
    forward = ranks.model.forward(
        ranks.weights[0], ranks.contexts[0], asked(describe((TOKENS, 0, (4, 2))), (89,))
    )
    sent, answer = {}, None
    while True:
        try:
            request = forward.send(answer)
        except StopIteration:
            break
        if request.stage.endswith(".dispatch"):
            sent[request.stage] = len(request.payload)
        answer = request.payload
    last = config.num_layers - 1
    assert sent.pop(f"{last}.dispatch") == config.top_k
    assert set(sent.values()) == {90 * config.top_k}
