"""vLLM's engine for CPUs, in process. Run by `interlace bench peers` in vLLM's environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import torch
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from interlace.rollout.peers.scripts import Said, now
from interlace.rollout.peers.serving import serve
from interlace.rollout.peers.tiles import may_use_tiles

if not may_use_tiles():
    # Its own kernels believe this, which tells what the processor has, and not what is permitted.
    # Every process that it starts runs these lines.
    torch.cpu._is_amx_tile_supported = lambda: False


class Vllm:
    """Prefixes are reused, tokens come as they are sampled, text is never made."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._numbers = engine, count()

    async def turn(self, name: str, context: Sequence[int], num: int, *, last: bool) -> Said:
        sampling = SamplingParams(
            temperature=0,
            max_tokens=num,
            min_tokens=num,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        tokens, times = list[int](), list[float]()
        prompt = {"prompt_token_ids": list(context)}
        async for output in self._engine.generate(prompt, sampling, str(next(self._numbers))):
            new = output.outputs[0].token_ids
            tokens += new
            times += [now()] * len(new)
        return Said(tokens=tokens, times=times)

    def close(self) -> None:
        self._engine.shutdown()


async def open_engine(job: Mapping[str, Any]) -> Vllm:
    chosen = {key: job["settings"][key] for key in job["settings"] if key != "num_processes"}
    arguments = AsyncEngineArgs(
        model=job["checkpoint"],
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=job["max_context"] + 64,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        enable_prefix_caching=True,
        disable_log_stats=True,
        **chosen,
    )
    return Vllm(AsyncLLM.from_engine_args(arguments))


if __name__ == "__main__":
    serve(open_engine)
