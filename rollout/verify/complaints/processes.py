"""Faults of environments and processes."""

from __future__ import annotations

from .complaint import Complaint, Proof

COMPLAINTS = (
    Complaint(
        row=40,
        threads=(
            "PrimeIntellect-ai/prime-rl#3139",
            "PrimeIntellect-ai/prime-rl#1816",
            "PrimeIntellect-ai/prime-rl#1448",
        ),
        complaint="A server of environments dies: requests wait for ten minutes or for ever, and "
        "the error is another one.",
        answer="answered",
        what="The end of a process is seen at once and told by its cause. Episodes that are not to "
        "blame are replayed in the next process.",
        proofs=(
            Proof(
                test="tests/envs/test_environment_pool.py"
                "::test_a_host_that_died_between_requests_blames_nobody",
                disabled="whoever asks a dead process is to blame",
            ),
        ),
    ),
    Complaint(
        row=41,
        threads=("PrimeIntellect-ai/verifiers#95", "fw-ai cookbook #692"),
        complaint="One slow verifier passes a time limit of the whole batch, and training ends.",
        answer="answered",
        what="Limits are per request of one episode: who passes one is a failed episode, never a "
        "failed job.",
        proofs=(
            Proof(
                test="tests/rollout/test_hostile_inputs.py"
                "::test_an_environments_misdeed_ends_only_its_own_episode[hangs]",
                disabled="one episode that takes too long ends the run",
            ),
        ),
    ),
    Complaint(
        row=42,
        threads=(
            "inclusionAI/AReaL#622",
            "NVIDIA-NeMo/RL#3592",
            "ray-project/ray#54364",
            "vllm-project/vllm#20860",
        ),
        complaint="After a job was killed its engines live on and hold the GPU's memory.",
        answer="partly",
        what="Processes of environments are tied by the kernel to who started them. Ranks belong "
        "to the job's Ray or torchrun, which end them; one whose peers are gone ends itself.",
        proofs=(
            Proof(
                test="tests/complaints/test_fixes.py::test_a_process_ends_with_its_parent",
                disabled="processes outlive their parent",
            ),
        ),
    ),
    Complaint(
        row=43,
        threads=("volcengine/verl#4308",),
        complaint="One dead engine ends the run.",
        answer="partly",
        what="A rank that fails ends the run with one error, and no rank is replaced. What was "
        "finished is given out before the error, what was in play is in `Run.partials` with every "
        "turn that had ended, and another rollout goes on with it to the same bits.",
        proofs=(
            Proof(
                test="tests/rollout/test_lost_ranks.py"
                "::test_what_was_in_play_when_a_rank_failed_goes_on_elsewhere_to_the_same_bits",
                disabled="what was in play is lost with the rank that failed",
            ),
        ),
    ),
)
