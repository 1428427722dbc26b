"""Ranks of a tiny model in one process, whose weights change as a test says; and one sequence of it
beside them, computed without scheduler, batches or cache to share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from tests.moe.driving import run_alone

from interlace.moe.config import read_config
from interlace.moe.context import PathContext
from interlace.moe.description import Description
from interlace.moe.kv_cache import BLOCK_SIZE, KVCache, attention_planes
from interlace.moe.model import ForwardOutput, Model
from interlace.moe.placement import Placement
from interlace.moe.sampler import Sampled, SampleRow, sample
from interlace.moe.sampling_params import SamplingParams
from interlace.moe.weights import Weights, load_weights
from interlace.rollout.changed import Changed
from interlace.rollout.config import RolloutConfig
from interlace.rollout.inbox import Inbox
from interlace.rollout.launch.compose import Rank, compose
from interlace.rollout.launch.local import LocalLauncher, LocalTransport
from interlace.rollout.messages import Event, Held, Stop, TurnRequest, TurnResult, UpdateMode

Folders = Mapping[int, Path]
"""Version -> a model; 0 is the one that ranks start with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One turn: what comes before it, and how many tokens it may have."""

    tokens: Sequence[int]
    num: int


@dataclass(slots=True, kw_only=True)
class Episode:
    """A trajectory in the making."""

    turns: Sequence[Asked]
    tokens: list[int] = field(default_factory=list)
    num_sampled: int = 0
    num_with_experts: int = 0
    done: list[tuple[TurnRequest, TurnResult]] = field(default_factory=list)


class Served:
    """The versions one rank holds. `committed` is the driver's; a rank may hear of it late."""

    def __init__(
        self,
        weights: Mapping[int, Weights],
        mode: UpdateMode,
        committed: list[int],
        *,
        late: int,
        on_step: Callable[[], None],
    ) -> None:
        self._weights, self._mode, self._committed = weights, mode, committed
        self._late, self._on_step = late, on_step
        self._heard = [0]
        self.installed_at: list[tuple[int, int]] = []
        """(version, step)"""
        self.changes: list[Changed] = []

    def ready(self) -> int:
        self._on_step()
        self._heard.append(max(self._committed, default=0))
        return self._heard[max(0, len(self._heard) - 1 - self._late)]

    def mode_of(self, version: int) -> UpdateMode:
        return self._mode

    def install(self, version: int) -> Weights:
        return self._weights[version]

    def installed(self, version: int, *, step: int, stall_s: float, changed: Changed) -> None:
        assert stall_s >= 0
        self.installed_at.append((version, step))
        self.changes.append(changed)


class Job:
    """Plays episodes to their end while versions come, at tokens (`positions`) or steps (`at`)."""

    def __init__(
        self,
        config: RolloutConfig,
        folders: Folders,
        episodes: Mapping[int, Sequence[Asked]],
        *,
        mode: UpdateMode = "keep",
        positions: Mapping[int, Mapping[int, int]] | None = None,
        at: Mapping[int, int] | None = None,
        temperature: float = 1.0,
        num_blocks: int = 64,
    ) -> None:
        """`positions`: version -> trajectory -> sampled tokens; `at`: step -> version."""
        self.episodes = {number: Episode(turns=turns) for number, turns in episodes.items()}
        self._config, self._temperature = config, temperature
        self._positions, self._at = positions or {}, at or {}
        self._held: dict[int, set[int]] = {version: set() for version in self._positions}
        self._committed: list[int] = []
        self._num_steps = 0
        self._requests: dict[int, TurnRequest] = {}
        self._open = set(episodes)
        launcher = LocalLauncher(config, folders[0])
        self._world = launcher._world()
        self._inboxes = [Inbox() for _ in range(config.layout.world)]
        killed = threading.Event()
        self.ranks: list[Rank] = []
        self.updates: list[Served] = []
        for number, inbox in enumerate(self._inboxes):
            transport = LocalTransport(self._world, number, killed)
            rank = compose(config, folders[0], transport, inbox, self._hear, num_blocks=num_blocks)
            updates = Served(
                {v: _same_share(rank.engine._weights, folders[v], v) for v in folders if v},
                mode,
                self._committed,
                late=number,
                on_step=self._count if number == 0 else lambda: None,
            )
            rank.engine._updates = updates
            self.ranks.append(rank)
            self.updates.append(updates)

    def play(self) -> list[tuple[TurnRequest, TurnResult]]:
        """All turns of all trajectories, in order of these."""
        for number in self.episodes:
            self._ask(number)
        self._commit()
        torch.set_num_threads(1)
        self._world.run([rank.engine.run() for rank in self.ranks], on_park=lambda: None)
        return [pair for _, episode in sorted(self.episodes.items()) for pair in episode.done]

    def _ask(self, number: int) -> None:
        episode = self.episodes[number]
        asked = episode.turns[len(episode.done)]
        episode.tokens += asked.tokens
        left = [
            (found.get(number, 0) - episode.num_sampled, version)
            for version, found in sorted(self._positions.items())
        ]
        request = TurnRequest(
            trajectory=number,
            turn=len(episode.done),
            token_ids=list(episode.tokens),
            seed=7,
            experts_from=episode.num_with_experts,
            sampling=SamplingParams(max_tokens=asked.num, temperature=self._temperature),
            holds=[(num, version) for num, version in left if num >= 0],
        )
        self._requests[number] = request
        layout = self._config.layout
        self._inboxes[layout.leader(number % layout.dp)].put(request)

    def _hear(self, event: Event) -> None:
        match event:
            case Held():
                self._held[event.version].add(event.trajectory)
            case TurnResult():
                self._record(event)
        self._commit()

    def _record(self, result: TurnResult) -> None:
        number = result.trajectory
        episode = self.episodes[number]
        episode.done.append((self._requests[number], result))
        episode.tokens += result.token_ids
        episode.num_sampled += len(result.token_ids)
        episode.num_with_experts += result.experts_shape[0]
        if len(episode.done) < len(episode.turns):
            self._ask(number)
            return
        self._open.remove(number)
        if not self._open:
            for inbox in self._inboxes:
                inbox.put(Stop())

    def _commit(self) -> None:
        for version, found in sorted(self._positions.items()):
            waited_for = (set(found) & self._open) - self._held[version]
            if not waited_for and version not in self._committed:
                self._committed.append(version)

    def _count(self) -> None:
        self._num_steps += 1
        if self._num_steps in self._at:
            self._committed.append(self._at[self._num_steps])


def _same_share(weights: Weights, folder: Path, version: int) -> Weights:
    return load_weights(
        folder,
        read_config(folder),
        expert_ids=weights.expert_ids,
        dtype=weights.dtype,
        version=version,
        tp_rank=weights.tp_rank,
        tp_size=weights.tp_size,
    )


class Reference:
    """One turn at a time, with all its keys and values of its own."""

    def __init__(self, folders: Folders) -> None:
        self._config = read_config(folders[0])
        everything = range(self._config.num_experts)
        self._weights = {
            version: load_weights(
                folder, self._config, expert_ids=everything, dtype=torch.float32, version=version
            )
            for version, folder in folders.items()
        }
        self._model = Model(self._config)

    def check(self, request: TurnRequest, result: TurnResult, mode: UpdateMode) -> None:
        """Every bit of the result is what it must be, given which version sampled each token."""
        versions, num = result.versions, len(result.token_ids)
        context = self._new_context()
        tokens, first = list(request.token_ids), versions[0]
        routed: list[bytes] = []
        computed, oldest = 0, first
        for nth, version in enumerate(versions):
            if nth and version != versions[nth - 1] and mode == "retract":
                context, computed, oldest = self._new_context(), 0, version
            output = self._forward(context, tokens, computed, version)
            experts = output.experts_TLK.numpy()
            routed += [row.tobytes() for row in experts[len(routed) - computed :]]
            computed = len(tokens)
            drawn = self._sample(request, output, tokens)
            told = (result.token_ids[nth], result.logprobs_raw[nth], result.logprobs[nth])
            assert told == (drawn.token, drawn.logprob_raw, drawn.logprob), f"token {nth} of {num}"
            assert result.kv_versions[nth] == oldest
            tokens.append(drawn.token)
        assert result.experts == b"".join(routed[request.experts_from :])

    def _new_context(self) -> PathContext:
        config = self._config
        kv = KVCache(
            num_layers=config.num_layers,
            num_blocks=8,
            planes=attention_planes(config),
            dtype=torch.float32,
        )
        placement = Placement.contiguous(config.num_experts, 1)
        return PathContext(path="alone", kv=kv, expert_placement=placement)

    def _forward(
        self, context: PathContext, tokens: Sequence[int], computed: int, version: int
    ) -> ForwardOutput:
        num = len(tokens) - computed
        rows = Description(
            input_ids=tuple(tokens[computed:]),
            positions=tuple(range(computed, len(tokens))),
            cu_seqlens_q=(0, num),
            block_tables=(tuple(range(-(-len(tokens) // BLOCK_SIZE))),),
            sample_rows=(num - 1,),
        )
        with torch.inference_mode():
            forward = self._model.forward(self._weights[version], context, rows, max_rows=num)
            output: ForwardOutput = run_alone(forward)
        return output

    def _sample(
        self, request: TurnRequest, output: ForwardOutput, tokens: Sequence[int]
    ) -> Sampled:
        row = SampleRow(
            params=request.sampling,
            seed=request.seed,
            trajectory=request.trajectory,
            position=len(tokens),
        )
        (drawn,) = sample(output.logits_SV, [row])
        return drawn


def experts_of(result: TurnResult) -> np.ndarray:
    """[positions, layers, top_k]"""
    return np.frombuffer(result.experts, np.uint8).reshape(result.experts_shape)
