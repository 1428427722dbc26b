"""The toy engine, unchanged, with one process a rank."""

import pytest
from tests.comm.toy import Engine, Layout, config_of, expected, random_jobs
from tests.distributed.transport import ListCommunicator, Ranks

from interlace.comm.plan import Mode


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["serial", "multiplexed"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_toy_gives_the_right_numbers(ranks: Ranks, mode: Mode, tp: int, seed: int) -> None:
    if ranks.size % tp:
        pytest.skip(f"tp {tp} does not divide {ranks.size} ranks")
    layout = Layout(world=ranks.size, tp=tp)
    config, jobs = config_of(layout, mode), random_jobs(seed, layout)
    engine = Engine(
        rank=ranks.rank,
        layout=layout,
        config=config,
        communicators={
            (path.name, role): ListCommunicator(
                ranks.communicator(path.name, role, groups, own_stream=True), ranks, path.name
            )
            for path in config.paths
            for role, groups in path.groups.items()
        },
        control=ranks.control(),
        jobs=jobs,
    )
    tokens = ranks.run(engine.run())
    mine = [job for job in jobs if job.home == ranks.rank // tp]
    assert tokens == {job.id: expected(layout, job) for job in mine}
