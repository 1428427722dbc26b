"""The long tail, routing of requests, throughput."""

from __future__ import annotations

from .complaint import Complaint, Proof

COMPLAINTS = (
    Complaint(
        row=16,
        threads=("volcengine/verl#6533",),
        complaint="Sessions never leave the replica they began on; in the tail the other replicas "
        "are idle.",
        answer="not yet",
        what="A trajectory stays on the ranks it began on, in the tail too: moved, its context is "
        "computed again. Where ranks step together and share the experts, as in all modes but "
        "`replicas`, none is idle while another works, and the best of eight rules for moving "
        "changes the time of three workloads by -3 to +1 % "
        "(`experiments/moving_trajectories.py`). Replicas would gain up to 13 %; nothing moves "
        "there either.",
    ),
    Complaint(
        row=17,
        threads=(
            "NovaSky-AI/SkyRL#1791",
            "PrimeIntellect-ai/prime-rl#3255",
            "PrimeIntellect-ai/prime-rl#3563",
        ),
        complaint="Consistent hashing crowds one replica: its cache thrashes, the hit rate falls "
        "from 98 % to 5 %.",
        answer="answered",
        what="A trajectory is placed by load. Those of one task group meet where their prompt is "
        "cached, as long as that place is not too far above the least loaded.",
        proofs=(
            Proof(
                test="tests/complaints/test_fixes.py"
                "::test_a_group_stays_together_until_its_place_is_too_full",
                disabled="a hash decides where a group lives",
            ),
        ),
    ),
    Complaint(
        row=18,
        threads=("sgl-project/sglang#33625",),
        complaint="Affinity with a bound on load gains 1.36x where work is spread evenly, and "
        "loses where it is one-sided.",
        answer="partly",
        what="Affinity is bounded the same way; what it gains at which skew is not measured.",
    ),
    Complaint(
        row=19,
        threads=("THUDM/slime#2176", "THUDM/slime#2007"),
        complaint="The end of oversampling waits for a slow judge; users want a ramp down before "
        "an update.",
        answer="partly",
        what="A run that has what it wants (`want`, or `stop`) ends what is in play at once, and "
        "waits for an environment no longer than one step may take. Judges work beside the "
        "episodes, from the first group on; one that is at work when there is enough is still "
        "waited for.",
        proofs=(
            Proof(
                test="tests/rollout/test_oversampling.py"
                "::test_nobody_waits_for_a_slow_environment_when_there_is_enough",
                disabled="who is in play when there is enough plays on",
                hangs=True,
            ),
        ),
    ),
    Complaint(
        row=20,
        threads=("inclusionAI/AReaL#1290",),
        complaint="Training collapses with one backend and is stable with the other, and no "
        "number tells them apart.",
        answer="answered",
        what="`interlace.rollout.mismatch` tells the gap between rollout and trainer per version "
        "and per age of keys and values: quantiles, k1, k3, effective sample size.",
        proofs=(
            Proof(
                test="tests/rollout/test_mismatch.py"
                "::test_every_version_has_a_row_and_every_age_of_keys_and_values",
                disabled="the gap of one version is all that is told",
            ),
        ),
    ),
    Complaint(
        row=21,
        threads=("llm-d/llm-d#1546",),
        complaint="Pools of prefill and decode leave GPUs idle for half of the time.",
        answer="answered",
        what="By default there are no pools and no ratio: prefill and decode take turns on the "
        "same ranks, within every step in which both have work.",
        proofs=(
            Proof(
                test="tests/comm/test_toy.py"
                "::test_multiplexing_overlaps_the_paths_and_serial_does_not",
                disabled="prefill and decode never share a step",
            ),
        ),
    ),
)
