"""Log-probabilities, routing to experts, determinism."""

from __future__ import annotations

from .complaint import Complaint, Proof

COMPLAINTS = (
    Complaint(
        row=28,
        threads=("volcengine/verl#6029", "radixark/miles#3277", "radixark/miles#407"),
        complaint="Where a rollout is resumed or retracted, the recorded experts are those of the "
        "recomputation, beside log-probabilities of the first pass; elsewhere the field gets lost.",
        answer="answered",
        what="Experts belong to a token as its log-probability does: as sampled, whatever is "
        "computed again. They are in every trajectory, and exported as SGLang and vLLM do.",
        proofs=(
            Proof(
                test="tests/rollout/test_updates_of_turns.py"
                "::test_retracted_turns_are_computed_again_and_keep_what_they_sampled",
                disabled="recorded experts are those computed last",
            ),
        ),
    ),
    Complaint(
        row=29,
        threads=("vime #64", "allenai/open-instruct#1473", "NVIDIA-NeMo/RL#4243"),
        complaint="Trainer and rollout drift apart, with one engine only, or even at learning "
        "rate 0.",
        answer="answered",
        what="A gate for a loop at learning rate 0 (`interlace.rollout.drift_gate`) raises when "
        "the gap grows. How many ranks share the experts changes no bit.",
        proofs=(
            Proof(
                test="tests/rollout/test_mismatch.py"
                "::test_the_gate_raises_when_the_gap_grows_though_weights_do_not_change",
                disabled="the gate lets every gap pass",
            ),
        ),
    ),
    Complaint(
        row=30,
        threads=("vllm-project/vllm#51287",),
        complaint="A flag promises batch invariance, and asynchronous scheduling undoes it.",
        answer="answered",
        what="Not a flag: each rank compares bits at its start, with its own weights and kernels, "
        "and every run says whether it is exact. One digest for all modes is what the suite tests.",
        proofs=(
            Proof(
                test="tests/moe/test_exactness.py"
                "::test_the_self_test_reports_a_kernel_that_depends_on_the_batch",
                disabled="the self-test compares nothing",
            ),
        ),
    ),
    Complaint(
        row=31,
        threads=("volcengine/verl#6847", "sgl-project/sglang#30233"),
        complaint="Garbage is decoded, from a faulty kernel or over keys and values that an "
        "aborted prefill never wrote, and is trained on without a word.",
        answer="partly",
        what="What an abandoned prefill should have written counts as not computed, and a "
        "log-probability that is no number is refused. Text that only reads as garbage raises no "
        "alarm.",
        proofs=(
            Proof(
                test="tests/complaints/test_fixes.py"
                "::test_nothing_is_found_of_a_prefill_that_was_abandoned",
                disabled="an abandoned prefill counts as computed",
            ),
        ),
    ),
    Complaint(
        row=32,
        threads=(
            "sgl-project/sglang#9266",
            "sgl-project/sglang#10560",
            "sgl-project/sglang#15674",
            "sgl-project/sglang#23272",
            "sgl-project/sglang#30609",
            "llm-d/llm-d#2433",
        ),
        complaint="Transfers of keys and values between prefill and decode fail or race with "
        "aborts; clients hang.",
        answer="answered",
        what="Multiplexed, the default, has no such transfer. Disaggregated, a transfer is a "
        "collective like any other, and blocks belong to a turn until the last word about it.",
        proofs=(
            Proof(
                test="tests/rollout/test_disaggregated.py"
                "::test_an_aborted_turn_keeps_its_blocks_until_the_last_word_about_it",
                disabled="an abort frees blocks that others still write",
            ),
        ),
    ),
)
