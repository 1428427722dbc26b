"""Continuous batching of transformers. Run by `interlace bench peers` in its own environment."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from interlace.rollout.peers.scripts import Said, now
from interlace.rollout.peers.serving import serve

_PAGE = 32
_NO_TOKEN = -1
"""Nothing ends a turn but its length."""


class ContinuousBatching:
    def __init__(self, manager: Any) -> None:
        self._manager, self._numbers = manager, count()
        manager.start()

    async def turn(self, name: str, context: Sequence[int], num: int, *, last: bool) -> Said:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[list[int]] = loop.create_future()
        times = list[float]()

        def heard(output: Any) -> None:
            times.extend([now()] * (len(output.generated_tokens) - len(times)))
            if output.is_finished():
                loop.call_soon_threadsafe(_settle, done, list(output.generated_tokens))

        request = f"request-{next(self._numbers)}"
        self._manager.register_result_handler(request, heard)
        self._manager.add_request(
            list(context),
            request_id=request,
            max_new_tokens=num,
            streaming=True,
            eos_token_id=_NO_TOKEN,
        )
        tokens = await done
        return Said(tokens=tokens, times=list(times))

    def close(self) -> None:
        self._manager.stop(block=False)


def _settle(future: asyncio.Future[list[int]], tokens: list[int]) -> None:
    if not future.done():
        future.set_result(tokens)


async def open_engine(job: Mapping[str, Any]) -> ContinuousBatching:
    torch.set_num_threads(job["num_threads"])
    model = AutoModelForCausalLM.from_pretrained(
        job["checkpoint"], dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()
    pages = -(-job["max_context"] // _PAGE) * job["num_scripts"]
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(
            do_sample=False, max_new_tokens=64, eos_token_id=_NO_TOKEN, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=_PAGE,
            num_blocks=pages + pages // 4,
            max_batch_tokens=512,
            use_cuda_graph=False,
            use_async_batching=False,
        ),
    )
    return ContinuousBatching(manager)


if __name__ == "__main__":
    serve(open_engine)
