from __future__ import annotations

import base64
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.torch import load_file
from tests.rollout.cutting import cut
from tests.rollout.ledgers import closed

from interlace.rollout import Rollout, RolloutConfig, Task, load_config
from interlace.rollout.cache import model_folder
from interlace.rollout.routing_export import sglang_base64, vllm_packed
from interlace.rollout.trajectory import Ledger, Source, Trajectory

EXPERTS = np.arange(5 * 2 * 3, dtype=np.uint8).reshape(5, 2, 3)


def routed(experts: NDArray[np.uint8] = EXPERTS) -> Trajectory:
    """Six tokens, the last of which was never forwarded."""
    ledger = Ledger()
    ledger.append_given([1, 2, 3], Source.PROMPT, 0)
    ledger.append_sampled([4, 5, 6], [-1.0] * 3, [-1.0] * 3, [0] * 3, [0] * 3, 0)
    ledger.set_experts(0, experts)
    return closed(ledger)


def test_sglang_reads_raw_int32_of_a_row_for_each_token_but_the_last() -> None:
    raw = base64.b64decode(sglang_base64(routed()), validate=True)
    assert len(raw) == 5 * 2 * 3 * 4
    assert np.frombuffer(raw, "<i4").reshape(5, 6).tolist() == EXPERTS.reshape(5, 6).tolist()
    raw = base64.b64decode(sglang_base64(routed(), 3))
    assert np.frombuffer(raw, "<i4").reshape(2, 2, 3).tolist() == EXPERTS[3:].tolist()


def test_vllm_reads_packed_bytes_with_their_shape_and_start() -> None:
    packed = vllm_packed(routed(), 2)
    assert {name: packed[name] for name in ("shape", "start", "dtype")} == {
        "shape": [3, 2, 3],
        "start": 2,
        "dtype": "uint8",
    }
    assert base64.b64decode(packed["data"]) == EXPERTS[2:].tobytes()
    wide = vllm_packed(routed(), dtype="uint16")
    assert (wide["dtype"], wide["shape"]) == ("uint16", [5, 2, 3])
    assert base64.b64decode(wide["data"]) == EXPERTS.astype("<u2").tobytes()


def test_layers_without_experts_are_rows_of_zeros_in_their_place() -> None:
    packed = vllm_packed(routed(), dense_layers=(0, 2))
    rows = np.frombuffer(base64.b64decode(packed["data"]), np.uint8).reshape(packed["shape"])
    assert packed["shape"] == [5, 4, 3]
    assert not rows[:, (0, 2)].any()
    assert rows[:, (1, 3)].tolist() == EXPERTS.tolist()


def test_what_cannot_be_exported_is_named() -> None:
    with pytest.raises(ValueError, match=r"6 tokens and experts of the first 4: .* resume it"):
        sglang_base64(routed(EXPERTS[:4]))
    with pytest.raises(ValueError, match="no layers with any"):
        vllm_packed(replace(routed(), experts=np.zeros((6, 0, 0), np.uint8)))
    with pytest.raises(ValueError, match="start is 6, and there are rows for tokens 0 to 5"):
        vllm_packed(routed(), 6)
    with pytest.raises(ValueError, match="dense layer 3 is none of the model's 3 layers"):
        sglang_base64(routed(), dense_layers=(3,))
    with pytest.raises(ValueError, match="uint8 or uint16, not 'int32'"):
        vllm_packed(routed(), dtype="int32")  # type: ignore[arg-type]


def long_answers(*overrides: str) -> RolloutConfig:
    settings = ("sampling.max_tokens=40", "layout.world=1", *overrides)
    return load_config(preset="tiny", overrides=settings)


def rows_of(answer: Trajectory) -> NDArray[np.uint8]:
    packed = vllm_packed(answer)
    data = np.frombuffer(base64.b64decode(packed["data"]), np.uint8)
    return data.reshape(packed["shape"])


PROMPTS = [f"{'a beginning that all of them share, ' * 3}and number {n // 2}" for n in range(8)]


@pytest.mark.slow
def test_routing_is_the_same_after_prefix_hits_and_preemption() -> None:
    exported = []
    for overrides in ((), ("scheduler.num_blocks=5",)):
        with Rollout(long_answers(*overrides)) as rollout:
            answers = rollout.generate(PROMPTS)
        exported.append([sglang_base64(answer) for answer in answers])
    recomputed = sum(step.recomputed for step in rollout.records[0][0])
    assert recomputed > 0
    assert any(answer.turns[0].cached_tokens > 64 for answer in answers)
    assert exported[0] == exported[1]
    with Rollout(long_answers()) as rollout:
        (alone,) = rollout.generate(PROMPTS[:1])
    assert sglang_base64(alone) == exported[0][0]


@pytest.mark.slow
def test_routing_of_a_resumed_answer_is_as_sampled() -> None:
    config = long_answers("sampling.stop_token_ids=[]")
    task = Task(prompt="tell me", max_tokens=20)
    with Rollout(config) as rollout:
        (whole,) = rollout.run([task])
    part = cut(whole, task, whole.num_tokens - whole.sampled_tokens // 2)
    other = replace(part, experts=np.where(part.experts == 0, 1, part.experts).astype(np.uint8))
    with Rollout(config) as rollout:
        (resumed,) = rollout.run(resume=[other])
    known = other.experts_known
    as_sampled, new = other.experts[:known], whole.experts[known : whole.experts_known]
    assert rows_of(resumed)[:known].tolist() == as_sampled.tolist()
    assert rows_of(resumed)[known:].tolist() == new.tolist()


@pytest.mark.slow
def test_routing_is_as_sampled_after_a_retract() -> None:
    config = long_answers("sampling.stop_token_ids=[]")
    task = Task(prompt="tell me", max_tokens=24)
    folder = model_folder("tiny-qwen3-moe")
    other = {
        name: -tensor if "mlp.gate." in name else tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    with Rollout(config) as rollout:
        (whole,) = rollout.run([task])
    with Rollout(config) as rollout:
        rollout.update_at({1: {0: 10}})
        run = rollout.run([task])
        rollout.update_weights(other, 1, mode="retract")
        (retracted,) = run
    first = whole.turns[0].start
    assert (retracted.version[retracted.loss_mask] == [0] * 10 + [1] * 14).all()
    assert (retracted.kv_version == retracted.version).all(), "all was computed again"
    settled = first + 10 - 1
    assert rows_of(retracted)[:settled].tolist() == rows_of(whole)[:settled].tolist()
    with Rollout(config) as rollout:
        rollout.update_weights(other, 1)
        (anew,) = rollout.run(resume=[cut(retracted, task, first + 10)])
        (later,) = rollout.run([task])
    assert (rows_of(later)[:first] != rows_of(whole)[:first]).any(), "recomputed they are others"
    assert anew.token_ids.tolist() == retracted.token_ids.tolist()
    assert rows_of(anew).tolist() == rows_of(retracted).tolist()
