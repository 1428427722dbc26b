"""What a workload file can say."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from interlace.rollout.config import MAX_SEED, RolloutConfig, Section

from .spread import Spread

ZERO = Spread(value=0)


class Scale(Section):
    """Factors on a workload, each 1 at full size."""

    prompts: float = Field(default=1.0, gt=0, description="On the number of prompts.")
    members: float = Field(default=1.0, gt=0, le=1, description="On the trajectories of a prompt.")
    turns: float = Field(default=1.0, gt=0, le=1, description="On the number of turns.")
    lengths: float = Field(
        default=1.0,
        gt=0,
        description="On the tokens a turn generates and appends. A prompt and the longest context "
        "are scaled by turns x lengths: they keep their share of a trajectory.",
    )
    seconds: float = Field(default=1.0, ge=0, description="On every latency, reset and penalty.")


class Faults(Section):
    """Steps of the environment that fail and are tried again."""

    rate: float = Field(ge=0, lt=1, description="Share of attempts that fail.")
    penalty_s: float = Field(ge=0, description="Seconds until the next attempt begins.")
    max_retries: int = Field(default=3, ge=1, description="An attempt behind so many succeeds.")


class Part(Section):
    """Episodes drawn from one set of distributions. Lengths are in tokens, times in seconds."""

    name: str = Field(min_length=1, description="Names its tasks.")
    num_prompts: int = Field(ge=1, le=100_000, description="Prompts, one for each group.")
    group_size: int = Field(default=1, ge=1, le=1024, description="Trajectories of one prompt.")
    prompt: Spread = Field(description="Length of a prompt; the members of a group share theirs.")
    turns: Spread = Field(default=Spread(value=1), description="Turns of a trajectory.")
    generate: Spread = Field(description="Tokens generated in a turn: exactly so many.")
    append: Spread | None = Field(
        default=None, description="Tokens that an observation appends, chat template included."
    )
    latency_s: Spread = Field(default=ZERO, description="Time of one step of the environment.")
    extra_latency_s: Spread = Field(default=ZERO, description="Added to every step.")
    reset_s: Spread = Field(default=ZERO, description="Time of a reset.")
    faults: Faults | None = Field(default=None, description="Steps that fail and are repeated.")
    max_context: int | None = Field(
        default=None, ge=2, description="An episode ends where it would grow longer."
    )
    group_correlation: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Between members of a group, of the normal scores of turns and generate.",
    )

    @model_validator(mode="after")
    def _turns_are_linked(self) -> Part:
        if self.append is None and self.turns.value != 1:
            raise ValueError("append is missing: episodes of several turns need it")
        return self


class Replay(Section):
    """Episodes read from a recording."""

    format: Literal["table", "mooncake", "tracelab", "taubench"] = Field(
        description="table: length tables of this package; the others: files as they are published."
    )
    file: str = Field(min_length=1, description="Its path, from the workload file's folder.")
    max_context: int | None = Field(
        default=None, ge=2, description="Episodes end there; longer prompts are left out."
    )


class WorkloadFile(Section):
    """A workload: episodes that are drawn or replayed, and how they become small."""

    summary: str = Field(min_length=1, description="What it stands for, in one line.")
    seed: int = Field(default=0, ge=0, le=MAX_SEED, description="Everything is drawn from it.")
    parts: tuple[Part, ...] = Field(
        default=(), strict=False, description="Drawn episodes; several parts are mixed evenly."
    )
    replay: Replay | None = Field(default=None, description="Recorded episodes instead.")
    minute: Scale = Field(
        default=Scale(), description="Factors with which one run takes about a minute on 2 cores."
    )
    job: RolloutConfig = Field(
        default=RolloutConfig(), description="Keys of the job, at the scale of a minute."
    )

    @model_validator(mode="after")
    def _is_drawn_or_replayed(self) -> WorkloadFile:
        if bool(self.parts) == (self.replay is not None):
            raise ValueError("give either [[parts]] or [replay]")
        names = [part.name for part in self.parts]
        if len(set(names)) < len(names):
            raise ValueError(f"two parts have one name: {', '.join(names)}")
        if self.job.tasks:
            raise ValueError("job.tasks: the tasks are the workload's own, remove them")
        return self
