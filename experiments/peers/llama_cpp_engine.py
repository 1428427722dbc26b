"""llama.cpp with a small continuous batcher like its server's, which the Python package has not.

Each trajectory keeps a sequence of the cache to itself, so a turn computes only what is new. A step
holds one token of every turn that decodes, then prompt tokens up to the batch's size. Run by
`interlace bench peers` in the package's own environment.
"""

from __future__ import annotations

import asyncio
import ctypes
import queue
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import llama_cpp
import numpy as np

from interlace.rollout.peers.scripts import Said, now
from interlace.rollout.peers.serving import serve

_BATCH = 512
_quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)


@dataclass(slots=True, eq=False)
class _Turn:
    name: str
    context: list[int]
    num: int
    last: bool
    done: asyncio.Future[Said]
    loop: asyncio.AbstractEventLoop
    sequence: int = -1
    num_cached: int = 0
    """Tokens of the context, and of what was said, that are in the cache."""
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)


class LlamaCpp:
    def __init__(self, context: Any, num_vocab: int, num_sequences: int) -> None:
        self._context, self._num_vocab = context, num_vocab
        self._memory = llama_cpp.llama_get_memory(context)
        self._batch = llama_cpp.llama_batch_init(_BATCH, 0, 1)
        self._asked: queue.Queue[_Turn] = queue.Queue()
        self._free = list(range(num_sequences))
        self._sequences: dict[str, int] = {}
        self._cached: dict[str, list[int]] = {}
        """What the sequence of a trajectory holds."""
        self._running: list[_Turn] = []
        self._waiting: list[_Turn] = []
        threading.Thread(target=self._work, name="llama.cpp", daemon=True).start()

    async def turn(self, name: str, context: Sequence[int], num: int, *, last: bool) -> Said:
        loop = asyncio.get_running_loop()
        turn = _Turn(name, list(context), num, last, loop.create_future(), loop)
        self._asked.put(turn)
        return await turn.done

    def close(self) -> None:
        return None

    def _work(self) -> None:
        while True:
            self._take()
            try:
                self._step()
            except Exception as error:
                for turn in self._running:
                    turn.loop.call_soon_threadsafe(turn.done.set_exception, error)
                return

    def _take(self) -> None:
        """What was asked meanwhile; waits if there is nothing else to do."""
        while True:
            try:
                idle = not self._running and not self._waiting
                self._waiting.append(self._asked.get(block=idle))
            except queue.Empty:
                break
        self._waiting = [turn for turn in self._waiting if not self._admit(turn)]

    def _admit(self, turn: _Turn) -> bool:
        """Whether there is a sequence for it; it begins behind what that holds of its context."""
        if turn.name not in self._sequences:
            if not self._free:
                return False
            self._sequences[turn.name], self._cached[turn.name] = self._free.pop(), []
        cached, context = self._cached[turn.name], turn.context
        same = 0
        while same < min(len(cached), len(context) - 1) and cached[same] == context[same]:
            same += 1
        turn.sequence, turn.num_cached = self._sequences[turn.name], same
        llama_cpp.llama_memory_seq_rm(self._memory, turn.sequence, same, -1)
        del cached[same:]
        self._running.append(turn)
        return True

    def _step(self) -> None:
        rows: list[tuple[int, _Turn]] = []
        """Places in the batch whose logits are wanted."""
        num = 0
        for turn in self._running:
            if turn.tokens:
                rows.append((num, turn))
                num = self._put(num, turn, turn.tokens[-1], wanted=True)
        for turn in self._running:
            while not turn.tokens and turn.num_cached < len(turn.context) and num < _BATCH:
                wanted = turn.num_cached == len(turn.context) - 1
                if wanted:
                    rows.append((num, turn))
                num = self._put(num, turn, turn.context[turn.num_cached], wanted=wanted)
        self._batch.n_tokens = num
        if code := llama_cpp.llama_decode(self._context, self._batch):
            raise RuntimeError(f"llama_decode gave {code} for {num} tokens")
        for place, turn in rows:
            logits = llama_cpp.llama_get_logits_ith(self._context, place)
            turn.tokens.append(int(np.ctypeslib.as_array(logits, (self._num_vocab,)).argmax()))
        at = now()
        for _, turn in rows:
            turn.times.append(at)
            if len(turn.tokens) == turn.num:
                self._end(turn)

    def _put(self, place: int, turn: _Turn, token: int, *, wanted: bool) -> int:
        batch = self._batch
        batch.token[place], batch.pos[place] = token, turn.num_cached
        batch.n_seq_id[place], batch.seq_id[place][0] = 1, turn.sequence
        batch.logits[place] = wanted
        turn.num_cached += 1
        self._cached[turn.name].append(token)
        return place + 1

    def _end(self, turn: _Turn) -> None:
        self._running.remove(turn)
        if turn.last:
            llama_cpp.llama_memory_seq_rm(self._memory, turn.sequence, 0, -1)
            self._free.append(self._sequences.pop(turn.name))
            del self._cached[turn.name]
        said = Said(tokens=turn.tokens, times=turn.times)
        turn.loop.call_soon_threadsafe(turn.done.set_result, said)


async def open_engine(job: Mapping[str, Any]) -> LlamaCpp:
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(
        job["gguf"].encode(), llama_cpp.llama_model_default_params()
    )
    if not model:
        raise RuntimeError(f"llama.cpp cannot read {job['gguf']}")
    num_sequences = job["num_scripts"]
    parameters = llama_cpp.llama_context_default_params()
    parameters.n_ctx = num_sequences * (-(-job["max_context"] // 256) * 256)
    parameters.n_batch = parameters.n_ubatch = _BATCH
    parameters.n_seq_max = num_sequences
    parameters.n_threads = parameters.n_threads_batch = job["num_threads"]
    parameters.kv_unified = False  # unified, each sequence's attention runs over all of them
    context = llama_cpp.llama_init_from_model(model, parameters)
    if not context:
        raise RuntimeError("llama.cpp cannot make a context of that size")
    vocabulary = llama_cpp.llama_model_get_vocab(model)
    llama_cpp.llama_log_set(_quiet, ctypes.c_void_p(0))
    return LlamaCpp(context, llama_cpp.llama_vocab_n_tokens(vocabulary), num_sequences)


if __name__ == "__main__":
    serve(open_engine)
