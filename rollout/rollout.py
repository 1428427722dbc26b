"""The one object a script needs: starts the ranks, takes tasks, gives trajectories."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from interlace.comm.journal import StepRecord, TicketRecord
from interlace.moe.sampler import validate
from interlace.moe.sampling_params import SamplingParams

from .balancer import Balancer
from .cache import model_folder
from .callbacks import Callback
from .chat import Chat
from .collector import Collector, Limits
from .config import RolloutConfig
from .environments import EnvironmentPool
from .launch.choose import launcher_for
from .launch.launcher import Launcher
from .messages import Event, RankReady, RankReport, TurnResult
from .meter import Meter
from .rewards import Rewarder, RewardFn, import_reward_fn
from .run import Run
from .tasks import Prompt, Task
from .trajectory import Trajectory
from .turns import RolloutError, Turns
from .unsafe_mark import marked, warn_of

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
        self.wall_s = 0.0
        """Seconds from the first task's start to the last trajectory's end."""
        named = config.rewards.reward_fn
        self._reward_fn = reward_fn or (import_reward_fn(named) if named else None)
        self._launcher: Launcher | None = None
        self._pool: EnvironmentPool | None = None
        self._ready: dict[int, RankReady] = {}
        self._cpu_s: dict[int, float] = {}
        self._next_id = 0
        self._work: set[asyncio.Task[Any]] = set()
        self._began_at: float | None = None
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
        self._turns = Turns(self._launcher.send)
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

    def run(self, tasks: Iterable[Task]) -> Run:
        """Start all tasks; iterate the answer for trajectories as they finish.

        Trajectory ids count the tasks in the order given, whatever order they enter in.
        """
        tasks = list(tasks)
        if not tasks:
            raise ValueError("there are no tasks to run")
        if not self.is_driver:
            return Run(0, lambda: None)
        run = Run(len(tasks), lambda: self._soon(self._taken))
        numbered = list(enumerate(tasks, start=self._next_id))
        self._next_id += len(tasks)
        if self.config.arrival_seed is not None:
            random.Random(self.config.arrival_seed).shuffle(numbered)
        self._spawn(self._feed(numbered, run))
        return run

    def submit(self, task: Task) -> Future[Trajectory]:
        """One trajectory as a future of `concurrent.futures`. Rank 0 only."""
        number = self._next_id
        self._next_id += 1
        return self._spawn(self._one(number, task))

    def generate(self, prompts: Sequence[Prompt], **task_fields: Any) -> list[Trajectory]:
        """Answer prompts (text, messages or token ids), in the order given.

        `task_fields` are fields of `Task`, such as max_tokens.
        """
        run = self.run(Task(prompt=prompt, **task_fields) for prompt in prompts)
        return sorted(run, key=lambda trajectory: trajectory.trajectory_id)

    def abort(self, trajectory_id: int) -> None:
        """End a trajectory as `aborted`, with the tokens it has; one that is done stays done."""
        self._soon(self._turns.abort, trajectory_id)

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
        stop = {*config.sampling.stop_token_ids, *chat.end_of_turn_ids}
        stop.update(*(ready.stop_token_ids for ready in self._ready.values()))
        sampling = SamplingParams(
            temperature=config.sampling.temperature,
            top_p=config.sampling.top_p,
            top_k=config.sampling.top_k,
            max_tokens=config.sampling.max_tokens,
            stop_token_ids=tuple(sorted(stop)),
            stop_strings=config.sampling.stop_strings,
        )
        limits = Limits(
            max_context=min(ready.max_context for ready in self._ready.values()),
            pool_tokens=min(ready.pool_tokens for ready in self._ready.values()),
            vocab_size=min(ready.vocab_size for ready in self._ready.values()),
        )
        validate(sampling, limits.vocab_size)
        self._collector = Collector(
            chat=chat,
            turns=self._turns,
            pool=pool,
            balancer=Balancer(self._launcher.num_leaders),
            limits=limits,
            sampling=sampling,
            max_turns=environments.max_turns,
            seed=config.seed,
        )
        places = environments.num_processes * environments.episodes_per_process
        rows = 2 * config.scheduler.max_running * self._launcher.num_leaders
        self._places = asyncio.Semaphore(max(places, rows))
        self._untaken, self._room = 0, asyncio.Event()
        self._room.set()
        self._meter.start(config)

    async def _feed(self, numbered: Sequence[tuple[int, Task]], run: Run) -> None:
        """Start the tasks one after the other while there are places and the caller keeps up."""
        sizes = Counter(task.group_id for _, task in numbered if task.group_id is not None)
        rewarder = None
        if self._reward_fn is not None:
            rewarder = Rewarder(self._reward_fn, self.config.rewards.per, dict(sizes))
        self._began_at = self._began_at or time.monotonic()
        try:
            async with asyncio.TaskGroup() as around:
                ticking = around.create_task(self._meter.tick())
                async with asyncio.TaskGroup() as group:
                    for number, task in numbered:
                        await self._room.wait()
                        await self._places.acquire()
                        group.create_task(self._deliver(number, task, rewarder, run))
                ticking.cancel()
        except* Exception as errors:
            run.put(_first(errors))

    async def _deliver(self, number: int, task: Task, rewarder: Rewarder | None, run: Run) -> None:
        try:
            with self._meter.playing(task.env):
                trajectory = marked(await self._collector.play(number, task), self.config.unsafe)
        finally:
            self._places.release()
        finished = [trajectory] if rewarder is None else await rewarder.reward(trajectory)
        self.wall_s = time.monotonic() - (self._began_at or 0.0)
        for item in finished:
            self._meter.finished(item)
            self._untaken += 1
            run.put(item)
        if self._untaken >= self.config.results_queue:
            self._room.clear()

    async def _one(self, number: int, task: Task) -> Trajectory:
        run = Run(1, lambda: None)
        await self._feed([(number, task)], run)
        self._untaken -= 1
        return await anext(aiter(run))

    def _taken(self) -> None:
        self._untaken -= 1
        if self._untaken < self.config.results_queue:
            self._room.set()

    async def _abandon(self) -> None:
        """End what is still played, and the environments.

        Only our own tasks are cancelled: those of the pool keep its processes in order.
        """
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
            case _:
                if isinstance(event, TurnResult):
                    self._soon(self._meter.sampled, len(event.token_ids))
                self._soon(self._turns.deliver, event)

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


def _first(errors: BaseExceptionGroup[Exception]) -> Exception:
    """What made a group of tasks fail: a RolloutError if there is one, else the first."""
    leaves: list[Exception] = []
    pending: list[Any] = [errors]
    while pending:
        error = pending.pop(0)
        if isinstance(error, BaseExceptionGroup):
            pending.extend(error.exceptions)
        else:
            leaves.append(error)
    return next((leaf for leaf in leaves if isinstance(leaf, RolloutError)), leaves[0])
