"""Trajectories that are lost, doubled, or biased."""

from __future__ import annotations

from .complaint import Complaint, Proof

COMPLAINTS = (
    Complaint(
        row=36,
        threads=(
            "NVIDIA-NeMo/RL#3599",
            "NVIDIA-NeMo/RL#3594",
            "NVIDIA-NeMo/RL#3480",
            "OpenRLHF/OpenRLHF#1322",
            "OpenRLHF/OpenRLHF#1323",
            "huggingface/trl#5911",
        ),
        complaint="Resuming loses what was under way, a third of the data and the long answers "
        "first; or it is not exact.",
        answer="answered",
        what="A run keeps what it did not finish (`Run.partials`); another one goes on with it, to "
        "the same bits as if nothing had happened. What was dropped is counted, with its lengths.",
        proofs=(
            Proof(
                test="tests/rollout/test_partial.py"
                "::test_what_was_sampled_stays_as_it_was_recorded",
                disabled="what is resumed begins anew",
            ),
        ),
    ),
    Complaint(
        row=37,
        threads=("radixark/miles#2800", "NovaSky-AI/SkyRL#1613"),
        complaint="One failed sample throws its whole group away, or ends the step.",
        answer="partly",
        what="A failed episode ends alone; the rest of its group is delivered. An episode whose "
        "process died by somebody else's fault is replayed; one that failed is not tried again.",
        proofs=(
            Proof(
                test="tests/rollout/test_hostile_inputs.py"
                "::test_an_environments_misdeed_ends_only_its_own_episode[step_raises]",
                disabled="one failed episode ends the run",
            ),
        ),
    ),
    Complaint(
        row=38,
        threads=("tinker-cookbook #506", "tinker-cookbook #497"),
        complaint="Leaving out episodes whose environment failed biases the data.",
        answer="partly",
        what="None is left out: it is a trajectory with its end reason and the tokens it had, and "
        "summary and evaluation count it. What a run leaves out it counts with its lengths "
        "(`Run.dropped`, `Run.length_bias`). A failed episode is not tried again.",
        proofs=(
            Proof(
                test="tests/rollout/test_evaluation.py"
                "::test_an_environment_error_is_not_solved_whatever_its_rewards",
                disabled="failed episodes count by their rewards",
            ),
        ),
    ),
    Complaint(
        row=39,
        threads=("THUDM/slime#2340", "sgl-project/sglang#11673"),
        complaint="Aborts do not arrive: orphaned requests go on and work is done twice. Or an "
        "abort gives back nothing of what was generated.",
        answer="answered",
        what="Whoever stops waiting for a turn ends it, under its trajectory's number. An aborted "
        "turn gives back the tokens it has.",
        proofs=(
            Proof(
                test="tests/complaints/test_fixes.py::test_a_turn_that_nobody_waits_for_is_ended",
                disabled="a cancelled turn goes on",
            ),
            Proof(
                test="tests/rollout/test_scheduler.py"
                "::test_an_aborted_running_turn_keeps_its_tokens",
                disabled="an aborted turn loses its tokens",
            ),
        ),
    ),
)
