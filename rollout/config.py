"""Everything a rollout can be told, as one frozen tree that is complete before anything starts.

A component receives its own section, never the tree. Each field's description is its reference
documentation. Reading a tree from TOML, presets and ``--set`` is in `config_file`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from interlace.comm.plan import Policy
from interlace.comm.unsafe import Arm, Level
from interlace.rollout.tasks import PROMPT_ENV, Task, tasks_from

MAX_SEED = (1 << 62) - 1


class ConfigError(ValueError):
    """The configuration cannot be used. The message says what is wrong, where, and what to do."""


class Section(BaseModel):
    """Frozen, no unknown keys, no silent conversions."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )


class ModelSection(Section):
    """Which model generates."""

    path: str = Field(
        default="smollm2-moe",
        min_length=1,
        description="A folder in Hugging Face format, or the name of a model that is built into "
        "the cache folder: smollm2-moe, or a tiny random one such as tiny-qwen3-moe "
        "(interlace model --help names them all).",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="Type of weights and cache; auto takes the one the checkpoint names.",
    )
    kernels: Literal["auto", "amx", "avx512", "avx512-bf16", "avx2"] = Field(
        default="auto",
        description="Instructions our kernels use on a CPU; auto takes the best of the processor. "
        "Each gives bits of its own, so ranks on different processors need one that all have.",
    )
    max_context: int | None = Field(
        default=None,
        ge=1,
        description="Longest trajectory in tokens; by default what the model allows.",
    )


class Layout(Section):
    """How one model is spread over ranks."""

    world: int = Field(default=1, ge=1, description="Number of ranks.")
    tp: int = Field(
        default=1, ge=1, description="Ranks that share one attention, each with part of the heads."
    )
    prefill_ranks: int | None = Field(
        default=None,
        ge=1,
        description="Mode disaggregated only: the first so many ranks prefill, the others decode; "
        "by default half of them.",
    )
    replicas: int | None = Field(
        default=None,
        ge=1,
        description="Mode replicas only: number of independent engines, each with as many ranks "
        "and a whole model; by default one for every tp ranks.",
    )

    @property
    def dp(self) -> int:
        """Number of data-parallel groups at home to trajectories, each to its own."""
        return (self.world - (self.prefill_ranks or 0)) // self.tp

    @property
    def ep(self) -> int:
        """Number of ranks of an engine that decode, over which the experts are spread."""
        return (self.world - (self.prefill_ranks or 0)) // (self.replicas or 1)

    @property
    def engines(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that step together: all of them, or those of each replica."""
        size = self.world // (self.replicas or 1)
        return tuple(tuple(range(at, at + size)) for at in range(0, self.world, size))

    def engine(self, rank: int) -> tuple[int, ...]:
        """The ranks that step together with this one."""
        return next(ranks for ranks in self.engines if rank in ranks)

    def leader(self, group: int) -> int:
        """The rank that leads a data-parallel group: its first."""
        return (self.prefill_ranks or 0) + group * self.tp

    @property
    def prefill_leaders(self) -> tuple[int, ...]:
        """Ranks that lead a group which only prefills."""
        return tuple(range(0, self.prefill_ranks or 0, self.tp))

    def members(self, work: Sequence[str], rank: int = 0) -> tuple[int, ...]:
        """The ranks of a path that does these kinds of work in the engine of `rank`."""
        if self.prefill_ranks is None or "transfer" in work:
            return self.engine(rank)
        split = self.prefill_ranks
        return tuple(range(split) if "prefill" in work else range(split, self.world))

    def side(self, rank: int) -> tuple[int, ...]:
        """The ranks over which the experts are spread that this one computes with."""
        work = "prefill" if rank < (self.prefill_ranks or 0) else "decode"
        return self.members((work,), rank)

    @model_validator(mode="after")
    def _tp_divides_the_ranks(self) -> Layout:
        if self.world % self.tp:
            raise ValueError(
                f"tp={self.tp} does not divide world={self.world}: every data-parallel group has "
                "tp ranks"
            )
        return self


Strategy = Literal["all_to_all", "fixed", "gather", "replicated"]


class Dispatch(Section):
    """How rows reach the ranks that own their experts, per path. No choice changes a token."""

    prefill: Strategy = Field(
        default="all_to_all",
        description="all_to_all: counts, then the rows that are needed; fixed: blocks for the "
        "worst case; gather: all rows to all ranks; replicated: all ranks have all rows at all "
        "times, and a layer two collectives instead of four (only where `layout.tp` is as many as "
        "step together). A path of mixed work follows this one.",
    )
    decode: Strategy = Field(
        default="all_to_all",
        description="The same for decode, whose batches are small: fixed and gather save it a "
        "collective in every layer.",
    )

    def of(self, work: Sequence[str]) -> Strategy:
        """The strategy of a path that does these kinds of work."""
        return self.prefill if "prefill" in work else self.decode


class LinkSection(Section):
    """Makes messages between ranks of one host take the time they would take on a link."""

    latency_us: float = Field(ge=0, description="Microseconds a message is on its way.")
    gbit: float | None = Field(
        default=None, gt=0, description="Gigabits a second; unlimited by default."
    )
    shared: bool = Field(
        default=True, description="One link out of a rank for all its paths, or one for each."
    )


class Launch(Section):
    """Where the ranks run and how long they wait for one another."""

    kind: Literal["local", "torchrun", "ray"] = Field(
        default="ray",
        description="ray: one actor a rank; torchrun: the processes torchrun started; "
        "local: all ranks in this process, for tests and debugging.",
    )
    address: str | None = Field(
        default=None,
        description="Ray cluster to join; by default one is started on this machine.",
    )
    backend: Literal["gloo", "nccl"] = Field(
        default="gloo", description="Process groups between ranks: gloo on CPU, nccl on GPU."
    )
    transport: Literal["auto", "window", "gloo"] = Field(
        default="auto",
        description="What moves bytes between ranks on CPU: window, memory that they share; gloo; "
        "auto takes the window where all ranks are on one host and its extension was built.",
    )
    link: LinkSection | None = Field(
        default=None,
        description="Over the window only: a message becomes visible after a latency and the time "
        "its bytes take, as over a network; control messages do not.",
    )
    window_mib: int | None = Field(
        default=None,
        ge=1,
        description="Room for one message of a path over the window; by default what the largest "
        "batch can need. It costs memory only as far as it is used.",
    )
    connect_timeout_s: float = Field(
        default=30.0, gt=0, description="All ranks have found one another within this time."
    )
    load_timeout_s: float = Field(
        default=300.0, gt=0, description="Weights are loaded and the first steps done within it."
    )
    exchange_timeout_s: float = Field(
        default=60.0, gt=0, description="Longest wait for the proposals of the other ranks."
    )
    ticket_timeout_s: float = Field(
        default=60.0, gt=0, description="Longest wait for one collective of a forward pass."
    )
    interleaving_seed: int = Field(
        default=0, ge=0, description="local only: the order in which ranks take their turns."
    )
    serial_device_slots: int = Field(
        default=0,
        ge=0,
        description="On CPU, ranks of one host: emulate devices that run collectives in strict "
        "order, with so many slots; 0 is off.",
    )

    journal_limit: int | None = Field(
        default=None,
        ge=1,
        description="Steps and collectives that each rank remembers, the last ones; by default "
        "all, of which traces and figures are made. A rollout that runs for days needs a limit.",
    )
    check_each_op: bool = Field(
        default=False,
        description="Before every collective its members compare what each is about to post. For "
        "debugging: it is slow, and it can hide what it looks for.",
    )

    @model_validator(mode="after")
    def _devices_are_emulated_on_cpu(self) -> Launch:
        if self.serial_device_slots and self.backend == "nccl":
            raise ValueError("serial_device_slots emulates what backend nccl has: leave it 0")
        return self

    @model_validator(mode="after")
    def _the_window_is_on_cpu(self) -> Launch:
        if self.transport == "window" and (self.backend == "nccl" or self.kind == "local"):
            other = "backend nccl" if self.backend == "nccl" else "kind local"
            raise ValueError(f"transport window and {other} exclude each other: use auto")
        if self.link is not None and (
            self.transport == "gloo" or self.backend == "nccl" or self.kind == "local"
        ):
            raise ValueError(
                "link needs the window: kind ray or torchrun, backend gloo and transport auto or "
                "window"
            )
        return self


class SchedulerSection(Section):
    """How a rank divides its steps and its memory. No choice here changes a token."""

    chunk_tokens: int = Field(
        default=256, ge=1, description="Most prefill tokens per rank and forward pass."
    )
    max_running: int = Field(
        default=32, ge=1, description="Most sequences decoding per rank and step."
    )
    num_blocks: int = Field(
        default=512, ge=1, description="KV cache of a rank, in blocks of 64 tokens."
    )
    chunk_steps: int = Field(
        default=2, ge=1, description="Steps a prefill chunk may span while anybody decodes."
    )
    start_tokens: int = Field(
        default=1, ge=1, description="A chunk starts once so many tokens wait on a rank, ..."
    )
    start_steps: int = Field(
        default=4, ge=1, description="... or once the oldest of them has waited so many steps."
    )
    park_ms: int = Field(
        default=5, ge=0, description="Longest sleep of a step in which no rank has work."
    )


class Order(Section):
    """How mode multiplexed orders a step in which prefill and decode both run."""

    policy: Literal["auto", Policy] = Field(
        default="auto",
        description="plan: decode's collectives evenly among prefill's boundaries, one exchange a "
        "step; abreast: a whole prefill, its collectives and decode's by turns, which lets both "
        "compute a layer in one call; auto: abreast where passes can go straight through a window, "
        "otherwise plan. To compare with: turnstile, all of decode's, a meeting of all ranks, one "
        "boundary of prefill; global_enqueue, a whole prefill, then decode.",
    )
    layers_per_boundary: int = Field(
        default=0,
        ge=0,
        description="Prefill lets decode pass behind so many whole layers; 0: behind every "
        "collective.",
    )


class Sampling(Section):
    """How tokens are drawn, and what ends a turn."""

    temperature: float = Field(default=1.0, ge=0, le=100, description="0 is greedy.")
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="Keep the most likely tokens up to this mass."
    )
    top_k: int = Field(default=0, ge=0, description="Keep the k most likely tokens; 0 keeps all.")
    max_tokens: int = Field(default=64, ge=1, description="Most tokens of one turn.")
    stop_token_ids: tuple[int, ...] = Field(
        default=(), strict=False, description="Tokens that end a turn, besides the model's own."
    )
    stop_strings: tuple[str, ...] = Field(
        default=(), strict=False, description="Texts that end a turn once they appear in it."
    )

    @field_validator("stop_token_ids")
    @classmethod
    def _ids_are_ids(cls, ids: tuple[int, ...]) -> tuple[int, ...]:
        for token_id in ids:
            if token_id < 0:
                raise ValueError(f"{token_id} is no token id: ids start at 0")
        return ids

    @field_validator("stop_strings")
    @classmethod
    def _strings_are_not_empty(cls, strings: tuple[str, ...]) -> tuple[str, ...]:
        if "" in strings:
            raise ValueError("an empty stop string would end every turn at once: remove it")
        return strings


class Environments(Section):
    """The processes environments live in, and what they may take."""

    num_processes: int = Field(default=2, ge=1, description="Processes that hold environments.")
    episodes_per_process: int = Field(
        default=8, ge=1, description="Episodes alive at once in each of them."
    )
    step_timeout_s: float = Field(
        default=30.0, gt=0, description="An episode whose step takes longer ends with an error."
    )
    reset_timeout_s: float = Field(
        default=60.0, gt=0, description="The same for its reset, which may load data."
    )
    cpus_per_process: float = Field(
        default=0.25, ge=0, description="ray only: share of a core each process reserves."
    )
    max_turns: int | None = Field(
        default=None, ge=1, description="Turns after which an episode is cut off; none by default."
    )
    pass_env: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="Environment variables, by name, that environments see besides PATH, HOME and "
        "the like, with the values that they have where the rollout was started; those that are "
        "not set there are left out.",
    )

    @field_validator("pass_env")
    @classmethod
    def _are_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if not re.fullmatch(r"[A-Za-z_]\w*", name):
                raise ValueError(f"{name!r} is no name of a variable: give names without values")
        return names


class Rewards(Section):
    """Rewards that are computed after an episode, on top of the environment's own."""

    reward_fn: str | None = Field(
        default=None, description="A function to import, as module:function."
    )
    per: Literal["trajectory", "group"] = Field(
        default="trajectory",
        description="What the function receives: one trajectory, or all of a group at once.",
    )

    @field_validator("reward_fn")
    @classmethod
    def _is_an_import_path(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", value):
            raise ValueError(f"{value!r} is not of the form module:function")
        return value


class WeightsSection(Section):
    """How new weights reach the ranks, and what happens to what older ones have computed."""

    root: str | None = Field(
        default=None,
        min_length=1,
        description="Folder below which weights may be read from disk in an update; by default no "
        "update comes from disk.",
    )
    bucket_mib: int = Field(
        default=64,
        ge=1,
        le=1024,
        description="Weights travel in parts of at most so many MiB; larger tensors are cut.",
    )
    timeout_s: float = Field(
        default=300.0,
        gt=0,
        description="An update fails once the ranks have not answered for so long: that they have "
        "a part, that all is complete and right, that it is in use.",
    )
    max_kv_staleness: int | None = Field(
        default=None,
        ge=0,
        description="No token attends to keys and values that are more versions old than this; "
        "turns that would are prefilled again. No bound by default.",
    )
    reuse_prefix: Literal["current", "stale"] = Field(
        default="current",
        description="What new turns may find in the prefix tree: only what the weights in use have "
        "computed, or older keys and values too.",
    )

    @field_validator("root")
    @classmethod
    def _root_is_the_same_everywhere(cls, root: str | None) -> str | None:
        return None if root is None else str(Path(root).expanduser().absolute())


_TWO_PATHS = ("one_window", "one_group", "free_order", "swap")


class Unsafe(Section):
    """Rules broken on purpose, to see it found: such a run may hang or give wrong tokens."""

    arms: tuple[Arm, ...] = Field(
        default=(),
        strict=False,
        description="What to break; docs/safety/unsafe.md says what each does. Never on by itself.",
    )
    without: tuple[Level, ...] = Field(
        default=(),
        strict=False,
        description="Levels of verification to switch off, to see what would have happened "
        "without them: L0, the executor's check before a post; L1, hashes in the exchange; L2, "
        "headers of messages (launch.kind local only).",
    )
    seed: int = Field(
        default=0, ge=0, le=MAX_SEED, description="Seed of what an arm leaves to chance."
    )

    @model_validator(mode="after")
    def _breaks_something_once(self) -> Unsafe:
        for name, values in (("arms", self.arms), ("without", self.without)):
            if len(set(values)) < len(values):
                raise ValueError(f"{name} {list(values)} names one twice: remove it")
        if self.without and not self.arms:
            raise ValueError("levels are switched off but no arm is on: remove without, or add one")
        return self


class TaskSection(Section):
    """A run of episodes in one environment, or the prompts of one file."""

    env: str = Field(
        default=PROMPT_ENV,
        min_length=1,
        description="Name of the environment; prompt answers the prompts of a file.",
    )
    count: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000,
        description="Number of tasks; by default one, or with a file all its rows.",
    )
    seed_start: int = Field(
        default=0,
        ge=0,
        le=MAX_SEED,
        description="Seed of the first task; the next ones count up from it.",
    )
    params: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the environment (JSON values)."
    )
    group_size: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="Trajectories per task; they share its group id and, in an environment, "
        "its seed.",
    )
    max_tokens: int | None = Field(
        default=None, ge=1, description="Most tokens of one turn here; sampling's by default."
    )
    file: str | None = Field(
        default=None, description="JSON Lines (.jsonl) or Parquet file with one prompt a row."
    )
    prompt_column: str = Field(
        default="prompt", min_length=1, description="Column of the file that holds the prompt."
    )
    answer_column: str | None = Field(
        default=None, description="Column that holds the reference answer, if there is one."
    )

    @model_validator(mode="after")
    def _is_an_environment_or_a_file(self) -> TaskSection:
        if self.file is None and self.env == PROMPT_ENV:
            raise ValueError("neither env nor file is given: name an environment or a prompt file")
        if self.file is not None and self.env != PROMPT_ENV:
            raise ValueError(f"both env {self.env!r} and file {self.file!r} are given: choose one")
        if self.file is not None and (self.params or self.seed_start):
            raise ValueError("params and seed_start belong to environments: remove them or file")
        return self

    def expand(self) -> list[Task]:
        """The tasks in order, those of one group behind each other.

        ValueError names file, line and column where a prompt file is not as it should be.
        """
        if self.file is not None:
            tasks = tasks_from(
                self.file,
                prompt=self.prompt_column,
                answer=self.answer_column,
                group_size=self.group_size,
            )
            some = tasks if self.count is None else tasks[: self.count * self.group_size]
            return [replace(task, max_tokens=self.max_tokens) for task in some]
        seeds = range(self.seed_start, self.seed_start + (self.count or 1))
        alone = [
            Task(self.env, seed=seed, params=self.params, max_tokens=self.max_tokens)
            for seed in seeds
        ]
        if self.group_size == 1:
            return alone
        return [replace(t, group_id=t.task_id) for t in alone for _ in range(self.group_size)]


class RolloutConfig(Section):
    """One rollout: the model, the ranks, the environments and the tasks."""

    mode: Literal[
        "serial", "chunked", "whole_forward", "multiplexed", "disaggregated", "replicas"
    ] = Field(
        default="multiplexed",
        description="How prefill and decode share the ranks: serial, one after the other; chunked, "
        "both in one batch; whole_forward, enqueued as two whole forward passes; multiplexed, "
        "interleaved at collective boundaries; disaggregated, not at all: each has its own, and "
        "keys and values move between them; replicas, as in serial in each of several engines that "
        "share no ranks.",
    )
    seed: int = Field(default=0, ge=0, le=MAX_SEED, description="Seed of the sampling noise.")
    numerics: Literal["exact"] = Field(
        default="exact",
        description="exact: tokens do not depend on mode, batch, chunking or number of ranks.",
    )
    arrival_seed: int | None = Field(
        default=None,
        ge=0,
        description="Shuffles the order in which tasks enter; by default the order given. "
        "Trajectory ids are those of the order given either way.",
    )
    results_queue: int = Field(
        default=64,
        ge=1,
        description="Finished trajectories held for the caller before new episodes wait.",
    )
    model: ModelSection = Field(default=ModelSection(), description="Which model generates.")
    layout: Layout = Field(default=Layout(), description="How it is spread over ranks.")
    dispatch: Dispatch = Field(
        default=Dispatch(), description="How rows reach their experts, per path."
    )
    launch: Launch = Field(default=Launch(), description="Where the ranks run.")
    scheduler: SchedulerSection = Field(
        default=SchedulerSection(), description="How a rank divides its steps and memory."
    )
    order: Order = Field(
        default=Order(), description="How a step is ordered, in comparisons of orders."
    )
    sampling: Sampling = Field(default=Sampling(), description="How tokens are drawn.")
    environments: Environments = Field(
        default=Environments(), description="The processes environments live in."
    )
    rewards: Rewards = Field(default=Rewards(), description="Rewards computed after an episode.")
    weights: WeightsSection = Field(
        default=WeightsSection(), description="New weights while the ranks generate."
    )
    unsafe: Unsafe = Field(
        default=Unsafe(), description="Rules to break on purpose, in tests of safety."
    )
    tasks: tuple[TaskSection, ...] = Field(
        default=(), strict=False, description="The episodes to run, in order."
    )

    @field_validator("numerics", mode="before")
    @classmethod
    def _numerics_are_built(cls, value: Any) -> Any:
        if value == "fast":
            raise ValueError("'fast' is not built yet; use 'exact'")
        return value

    @model_validator(mode="after")
    def _a_process_has_one_kind_of_kernels(self) -> RolloutConfig:
        if self.model.kernels != "auto" and self.launch.kind == "local":
            raise ValueError(
                f"model.kernels={self.model.kernels} is of ranks that are processes, and "
                "launch.kind is local: take ray or torchrun"
            )
        return self

    @model_validator(mode="after")
    def _both_kinds_of_work_have_ranks(self) -> RolloutConfig:
        layout = self.layout
        world, tp, prefill = layout.world, layout.tp, layout.prefill_ranks
        if self.mode != "disaggregated":
            if prefill is not None:
                raise ValueError(
                    f"layout.prefill_ranks is of mode disaggregated, and the mode is {self.mode}: "
                    "leave it out"
                )
            return self
        if world < 2 * tp:
            raise ValueError(
                f"mode disaggregated needs a group of layout.tp={tp} ranks to prefill and one to "
                f"decode, layout.world is {world}"
            )
        if prefill is None:
            prefill = max(tp, world // 2 // tp * tp)
            filled = layout.model_copy(update={"prefill_ranks": prefill})
            object.__setattr__(self, "layout", filled)
        if prefill % tp or not 0 < prefill < world:
            raise ValueError(
                f"layout.prefill_ranks={prefill} of {world} ranks: those that prefill and those "
                f"that decode are groups of tp={tp}, and there is at least one of each"
            )
        return self

    @model_validator(mode="after")
    def _sides_hold_the_same(self) -> RolloutConfig:
        if self.mode == "disaggregated" and self.weights.reuse_prefix == "stale":
            raise ValueError(
                "weights.reuse_prefix stale and mode disaggregated exclude each other: those who "
                "prefill and those who decode would reuse keys and values of different versions"
            )
        return self

    @model_validator(mode="after")
    def _replicas_are_alike(self) -> RolloutConfig:
        layout = self.layout
        world, tp, replicas = layout.world, layout.tp, layout.replicas
        if self.mode != "replicas":
            if replicas is not None:
                raise ValueError(
                    f"layout.replicas is of mode replicas, and the mode is {self.mode}: leave it "
                    "out"
                )
            return self
        if replicas is None:
            filled = layout.model_copy(update={"replicas": layout.dp})
            object.__setattr__(self, "layout", filled)
        elif world % replicas or world // replicas % tp:
            raise ValueError(
                f"layout.replicas={replicas} of {world} ranks: each has as many ranks as the "
                f"others, in groups of tp={tp}"
            )
        return self

    @model_validator(mode="after")
    def _replicated_rows_are_of_one_group(self) -> RolloutConfig:
        for work in ("prefill", "decode"):
            size = len(self.layout.members((work,), self.layout.engine(0)[0]))
            if getattr(self.dispatch, work) == "replicated" and size != self.layout.tp:
                raise ValueError(
                    f"dispatch.{work}=replicated needs the {size} ranks that {work} together to be "
                    f"one tensor-parallel group, and layout.tp is {self.layout.tp}: take "
                    f"layout.tp={size}, or gather"
                )
        return self

    @model_validator(mode="after")
    def _only_multiplexed_is_ordered(self) -> RolloutConfig:
        if self.mode != "multiplexed" and self.order != Order():
            raise ValueError(f"order is of mode multiplexed, and the mode is {self.mode}: leave it")
        return self

    @model_validator(mode="after")
    def _unsafe_arms_can_bite(self) -> RolloutConfig:
        arms = self.unsafe.arms
        if arms and len(self.layout.engine(0)) == 1:
            raise ValueError(
                "unsafe.arms need layout.world of 2 or more (in mode replicas, so many ranks for "
                "each): one rank cannot disagree"
            )
        needs_two = [arm for arm in arms if arm in _TWO_PATHS]
        if needs_two and self.mode == "chunked":
            raise ValueError(f"unsafe arm {needs_two[0]} needs two paths, mode chunked has one")
        if needs_two and self.mode == "disaggregated":
            raise ValueError(
                f"unsafe arm {needs_two[0]} needs two paths of the same ranks, in mode "
                "disaggregated each has its own"
            )
        if "slot_per_path" in arms and self.layout.tp == 1:
            raise ValueError(
                "unsafe arm slot_per_path needs layout.tp of 2 or more: with one role, counting "
                "per path and per role is the same"
            )
        if "L2" in self.unsafe.without and self.launch.kind != "local":
            raise ValueError("unsafe.without L2 needs launch.kind local")
        return self

    def expand_tasks(self) -> list[Task]:
        """All tasks in the order of their trajectory ids; ValueError if there is none."""
        tasks = [task for section in self.tasks for task in section.expand()]
        if not tasks:
            raise ValueError("there are no tasks: add a [[tasks]] section with env and count")
        return tasks
