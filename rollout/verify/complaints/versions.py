"""Weights, keys and values, and their versions."""

from __future__ import annotations

from .complaint import Complaint, Proof

COMPLAINTS = (
    Complaint(
        row=22,
        threads=("inclusionAI/AReaL#1569", "rllm-org/rllm#622"),
        complaint="The version of a token is read when the answer is complete, so tokens from "
        "before an update carry the number behind it.",
        answer="answered",
        what="A token gets its version where it is sampled, in the step, from the weights that "
        "sampled it.",
        proofs=(
            Proof(
                test="tests/rollout/test_updates_of_turns.py"
                "::test_kept_turns_go_on_over_old_keys_and_say_so",
                disabled="the version is read when an answer is complete",
            ),
        ),
    ),
    Complaint(
        row=23,
        threads=(
            "NVIDIA-NeMo/RL#4018",
            "radixark/miles#2783",
            "InternLM/lmdeploy#4917",
            "pytorch/rl#4016",
            "vllm-project/vllm#9744",
        ),
        complaint="Cached prefixes outlive an update: keys and values are up to 17 versions old, "
        "and the metric that should show mixed versions is near zero.",
        answer="answered",
        what="Every cached block knows the weights it is from. New turns find none of older ones, "
        "unless they may; `weights.max_kv_staleness` bounds the age for running ones too; each "
        "token says how old the oldest keys and values are that it attends to.",
        proofs=(
            Proof(
                test="tests/rollout/test_updates_of_turns.py"
                "::test_new_turns_find_only_what_the_weights_in_use_have_computed",
                disabled="the prefix cache outlives an update",
            ),
            Proof(
                test="tests/rollout/test_updates_of_turns.py"
                "::test_no_token_attends_to_keys_that_are_older_than_the_bound",
                disabled="keys and values may be of any age",
            ),
            Proof(
                test="tests/rollout/test_updates_of_turns.py"
                "::test_kept_turns_go_on_over_old_keys_and_say_so",
                disabled="keys and values count as new as the token",
            ),
        ),
    ),
    Complaint(
        row=24,
        threads=("radixark/miles#2589", "radixark/miles#2372", "radixark/miles#2296"),
        complaint="Setting the number of the version aborts all that runs: forty groups and a "
        "million tokens in every step.",
        answer="answered",
        what="`set_version` gives the weights in use another number; nothing is aborted, dropped, "
        "or computed again.",
        proofs=(
            Proof(
                test="tests/rollout/test_updates_of_turns.py"
                "::test_another_number_for_the_same_weights_disturbs_nobody",
                disabled="a new number aborts what runs",
            ),
        ),
    ),
    Complaint(
        row=25,
        threads=(
            "vllm-project/vllm#57854",
            "ai-dynamo/dynamo#9131",
            "NVIDIA/TensorRT-LLM#16642",
            "NVIDIA-NeMo/RL#3615",
        ),
        complaint="An update reaches some ranks and not others, and both go on serving.",
        answer="answered",
        what="All ranks use a version from the same step on, or none ever does: one that refuses "
        "it is an error with its name, after which nothing has changed anywhere.",
        proofs=(
            Proof(
                test="tests/weights/test_publisher.py"
                "::test_one_refusal_discards_it_everywhere_and_names_rank_and_cause",
                disabled="a rank that refuses an update is not heard",
            ),
        ),
    ),
    Complaint(
        row=26,
        threads=("huggingface/trl#5312",),
        complaint="Weights are silently not transferred; log-probabilities of trainer and rollout "
        "differ by up to 7.",
        answer="answered",
        what="A digest of all weights as they were received, made by the driver and by every rank: "
        "unless all are equal, nothing is installed. `Rollout.weights_digest` tells it.",
        proofs=(
            Proof(
                test="tests/weights/test_publisher.py::test_a_rank_with_other_numbers_is_named",
                disabled="digests of the weights are not compared",
            ),
        ),
    ),
    Complaint(
        row=27,
        threads=("vllm-project/vllm#34600", "THUDM/slime#579"),
        complaint="Waking up leaks memory, or letting go of it returns before it is free; then "
        "there is none.",
        answer="not applicable",
        what="There is no sleep mode: ranks hold their memory from their start to their end.",
    ),
)
