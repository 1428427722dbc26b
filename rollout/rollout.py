"""The one object a script needs: starts the ranks, takes tasks, gives trajectories."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self, get_args

from interlace.comm.journal import StepRecord, TicketRecord

from .assignment import Assignment, assign
from .cache import model_folder
from .callbacks import Callback
from .chat import Chat
from .config import RolloutConfig
from .environments import EnvironmentPool
from .launch.choose import launcher_for
from .launch.launcher import Launcher
from .messages import (
    Event,
    Installed,
    RankFailure,
    RankReady,
    RankReport,
    Staged,
    Taken,
    TurnResult,
)
from .meter import Meter
from .oversampling import Accept, Rules
from .player import Player
from .player_parts import compose_player
from .rewards import RewardFn, import_reward_fn
from .run import Run
from .tasks import Prompt, Task
from .trajectory import Trajectory
from .trajectory_ids import TrajectoryIds
from .turns import PauseMode, Turns
from .unsafe_mark import warn_of
from .weights_sync.outgoing import Source
from .weights_sync.publisher import ChangeMode, Publisher
from .weights_sync.report import UpdateReport

Records = dict[int, tuple[Sequence[StepRecord], Sequence[TicketRecord]]]


class Rollout:
    """Ranks and environments from ``with`` to its end; nothing is left running after it.

    Under torchrun every rank runs the same script; on ranks other than 0 `is_driver` is false,
    `run` yields nothing, and leaving the ``with`` serves until rank 0 leaves it.
    """

    def __init__(
        self,
        config: RolloutConfig,
        *,
        reward_fn: RewardFn | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        """`reward_fn` is used as ``rewards.reward_fn`` would be, and comes before it.

        `callbacks` are told what happens; under torchrun, those of rank 0.
        """
        self.config = config
        self.records: Records = {}
        """Rank -> (steps, tickets); filled when the ``with`` ends in order."""
        self.exact = False
        """Whether every rank's kernels passed the self-test, and no rule is broken on purpose."""
        self.transport: dict[str, str] = {}
        """What moves bytes between the ranks (`kind`), and `why`; known once they are ready."""
        named = config.rewards.reward_fn
        self._reward_fn = reward_fn or (import_reward_fn(named) if named else None)
        self._launcher: Launcher | None = None
        self._pool: EnvironmentPool | None = None
        self._ready: dict[int, RankReady] = {}
        self._cpu_s: dict[int, float] = {}
        self._ids = TrajectoryIds()
        self._work: set[asyncio.Task[Any]] = set()
        self._player: Player | None = None
        self._publisher: Publisher | None = None
        self._meter = Meter(callbacks)

    @property
    def running(self) -> Mapping[str, int]:
        """Environment -> episodes begun and not finished; changes while you look."""
        return self._meter.running

    @property
    def asked(self) -> Sequence[tuple[int, float]]:
        """Trajectory and time of every turn asked of the ranks; on one host, by their clock."""
        return self._turns.asked

    @property
    def cpu_s(self) -> float:
        """CPU seconds of all rank processes since they were ready; known with the records."""
        return sum(self._cpu_s.values())

    @property
    def wall_s(self) -> float:
        """Seconds from the first task's start to the last trajectory's end."""
        return 0.0 if self._player is None else self._player.wall_s

    @property
    def _playing(self) -> Player:
        if self._player is None:
            raise RuntimeError("a rollout has no ranks outside of its `with`: enter it first")
        return self._player

    @property
    def _publishing(self) -> Publisher:
        if self._publisher is None:
            raise RuntimeError("a rollout has no weights outside of its `with`: enter it first")
        return self._publisher

    @property
    def version(self) -> int:
        """Of the weights that are in use on all ranks; 0 for those they start with. Known on
        rank 0."""
        return self._publishing.version

    @property
    def weights_digest(self) -> str:
        """Of the weights that are in use, the same on all ranks. Known on rank 0."""
        return self._publishing.digest

    @property
    def is_driver(self) -> bool:
        return self._launcher is None or self._launcher.is_driver

    # ---- life

    def __enter__(self) -> Self:
        folder = model_folder(self.config.model.path)
        chat = Chat(folder)
        self._launcher = launcher_for(self.config, folder)
        if self._launcher.is_driver:
            warn_of(self.config.unsafe)
        self._loop = asyncio.new_event_loop()
        self._publisher = Publisher(
            world=self.config.layout.world,
            tell=self._launcher.tell,
            folder=folder,
            section=self.config.weights,
        )
        self._turns = Turns(
            self._launcher.send,
            num_leaders=self._launcher.num_leaders,
            barrier=self._publisher.barrier,
        )
        try:
            self._launcher.start(self._on_event)
            if self._launcher.is_driver:
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name="interlace collector", daemon=True
                )
                self._thread.start()
                self._call(self._open(chat))
        except BaseException:
            self._end(kill=True)
            raise
        self.exact = all(ready.exact for ready in self._ready.values())
        for ready in self._ready.values():  # they say the same
            self.transport = {"kind": ready.transport, "why": ready.transport_why}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end(kill=error is not None)

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.__enter__)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.__exit__, kind, error, trace)

    # ---- work

    def run(
        self,
        tasks: Iterable[Task] = (),
        *,
        resume: Iterable[Trajectory] = (),
        want: int | None = None,
        accept: Accept | None = None,
        max_staleness: int | None = None,
    ) -> Run:
        """Start all tasks; iterate the answer for trajectories as they finish.

        Trajectory ids count the tasks in the order given, whatever order they enter in.

        `resume`: what another run gave as `partials`. It keeps its ids and comes first; aborted
        trajectories go on behind their own tokens, finished ones wait for their group. An
        environment is brought back by replaying the recorded actions: one that then shows something
        else ends its trajectory as environment_error.

        With `want`, the run ends when so many trajectories have been accepted: the others are
        aborted. `accept` is asked about each finished group (a trajectory without group_id is one
        of its own), in a thread. `max_staleness`: most versions between the oldest token of a
        trajectory and the weights in use when it is given out. With any of the three, groups are
        given out whole or not at all, one member after the other; so the last group may exceed
        `want`. `Run.partials` and `Run.dropped` tell what became of the rest.
        """
        tasks, unfinished = list(tasks), list(resume)
        rules = Rules(want=want, accept=accept, max_staleness=max_staleness)
        num = len(tasks) + len(unfinished)
        if not num:
            raise ValueError("there are no tasks to run")
        if want is not None and want > num:
            raise ValueError(f"want is {want}, and there are {num} tasks: add some")
        if not self.is_driver:
            nothing = Run(0)
            nothing.end()
            return nothing
        assignments = assign(self._ids, tasks, unfinished, self.config.arrival_seed)
        stopping = asyncio.Event()
        run = Run(
            num if want is None else want,
            rules=rules,
            version=lambda: self.version,
            taken=lambda num: self._soon(self._playing.taken, num),
            stop=lambda: self._soon(stopping.set),
        )
        self._spawn(self._playing.play(assignments, run, rules, stopping))
        return run

    def submit(self, task: Task) -> Future[Trajectory]:
        """One trajectory as a future of `concurrent.futures`. Rank 0 only."""
        (assignment,) = assign(self._ids, [task], (), None)
        return self._spawn(self._one(assignment))

    def generate(self, prompts: Sequence[Prompt], **task_fields: Any) -> list[Trajectory]:
        """Answer prompts (text, messages or token ids), in the order given.

        `task_fields` are fields of `Task`, such as max_tokens.
        """
        run = self.run(Task(prompt=prompt, **task_fields) for prompt in prompts)
        return sorted(run, key=lambda trajectory: trajectory.trajectory_id)

    def abort(self, trajectory_id: int) -> None:
        """End a trajectory as `aborted`, with the tokens it has; one that is done stays done."""
        self._soon(self._turns.abort, trajectory_id)

    def pause(self, mode: PauseMode = "keep") -> None:
        """Start no turn until `resume`. The ranks come to it at their next step.

        keep: running turns are held as they are; environments go on. abort: every trajectory that
        has been begun ends as aborted with what it has; those that wait for a place wait on.
        ValueError for another mode.
        """
        if mode not in get_args(PauseMode):
            raise ValueError(f"a pause is of mode {' or '.join(get_args(PauseMode))}, not {mode!r}")
        self._soon(self._turns.pause, mode)

    def resume(self) -> None:
        """Go on after a `pause`."""
        self._soon(self._turns.resume)

    def update_weights(
        self, source: Source, version: int | None = None, *, mode: ChangeMode = "keep"
    ) -> UpdateReport:
        """Bring new weights to all ranks while they generate; returns once all use them.

        `source`: a state dict; an iterable of parts of one; a Path under ``weights.root``; or a
        TrainerGroup. Names are the hub's or those of transformers 5. `version`: by default the next
        one. `mode`: what becomes of turns that run: keep, they go on over their old keys and
        values; retract, these are computed again; abort, the turns end with what they have.

        Raises ValueError for a version that is not newer, and UpdateError, with which nothing has
        changed, for weights that are not the model's or did not reach every rank whole and in time.
        Waits for the positions of `update_at`. One at a time; any thread may call it.
        """
        if not self.is_driver:
            return UpdateReport.told_elsewhere(version or 0, mode)
        return self._publishing.update(source, version, mode=mode)

    def set_version(self, version: int) -> UpdateReport:
        """Give the weights that are in use another number. Raises as `update_weights` does."""
        if not self.is_driver:
            return UpdateReport.told_elsewhere(version, "same")
        return self._publishing.rename(version)

    def update_at(self, positions: Mapping[int, Mapping[int, int]]) -> None:
        """Schedule updates before `run`: {version: {trajectory id: tokens sampled before it}}.

        A trajectory samples no more than so many tokens until that version is in use, one that is
        not listed none at all; and `update_weights` to that version waits until all that are listed
        have come so far, or have ended. ValueError for positions that contradict one another.
        """
        self._publishing.barrier.at(positions)

    # ---- in the collector's loop

    async def _open(self, chat: Chat) -> None:
        assert self._launcher is not None
        config, environments = self.config, self.config.environments
        pool = EnvironmentPool(
            factory=self._launcher.environment_hosts,
            num_hosts=environments.num_processes,
            episodes_per_host=environments.episodes_per_process,
            step_timeout_s=environments.step_timeout_s,
            reset_timeout_s=environments.reset_timeout_s,
        )
        self._pool = await pool.__aenter__()
        self._player = compose_player(
            config,
            chat=chat,
            ready=list(self._ready.values()),
            num_leaders=self._launcher.num_leaders,
            pool=pool,
            turns=self._turns,
            meter=self._meter,
            ids=self._ids,
            version=lambda: self.version,
            reward_fn=self._reward_fn,
        )
        self._meter.start(config)

    async def _one(self, assignment: Assignment) -> Trajectory:
        run = Run(1, taken=self._playing.taken)
        await self._playing.play([assignment], run, Rules(), asyncio.Event())
        return await anext(aiter(run))

    async def _abandon(self) -> None:
        """End what is still played, and the environments.

        Only our own tasks are cancelled: those of the pool keep its processes in order.
        """
        self._turns.resume()  # ranks that are held could not finish
        unfinished = list(self._work)
        for task in unfinished:
            task.cancel()
        if self._pool is not None:  # now, so that nobody waits for an environment that hangs
            await self._pool.__aexit__(None, None, None)
        await asyncio.gather(*unfinished, return_exceptions=True)

    # ---- between threads

    def _on_event(self, event: Event) -> None:
        match event:
            case RankReady():
                self._ready[event.rank] = event
            case RankReport():
                self.records[event.rank] = (event.steps, event.tickets)
                self._cpu_s[event.rank] = event.cpu_s
            case Taken() | Staged() | Installed():
                self._publishing.deliver(event)
            case _:
                if isinstance(event, RankFailure):
                    self._publishing.end(event.text)
                self._soon(self._heard, event)

    def _heard(self, event: Event) -> None:
        if isinstance(event, TurnResult):
            self._meter.sampled(len(event.token_ids))
        self._turns.deliver(event)

    def _soon(self, function: Any, *args: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        async def tracked() -> Any:
            task = asyncio.current_task()
            assert task is not None
            self._work.add(task)
            try:
                return await work
            finally:
                self._work.remove(task)

        return asyncio.run_coroutine_threadsafe(tracked(), self._loop)

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _end(self, *, kill: bool) -> None:
        launcher = self._launcher
        assert launcher is not None
        started = self._loop.is_running()
        self._publishing.end("the rollout was left")
        with ExitStack() as last_first:
            last_first.callback(self._loop.close)
            if started:
                last_first.callback(self._thread.join)
                last_first.callback(self._loop.call_soon_threadsafe, self._loop.stop)
                last_first.callback(self._call, self._tell_end(completed=not kill))
            last_first.callback(launcher.kill if kill else launcher.stop)
            if started:
                self._call(self._abandon())

    async def _tell_end(self, *, completed: bool) -> None:
        self._meter.end(completed=completed, wall_s=self.wall_s, cpu_s=self.cpu_s, exact=self.exact)
