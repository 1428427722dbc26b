"""Tokens, masks, truncation."""

from __future__ import annotations

from .complaint import Complaint, Proof

COMPLAINTS = (
    Complaint(
        row=33,
        threads=(
            "sgl-project/sglang#26555",
            "modelscope/ms-swift#10012",
            "volcengine/verl#6719",
            "NeMo Gym #1416",
            "NVIDIA-NeMo/RL#1337",
            "huggingface/trl#6250",
        ),
        complaint="History is tokenised again and differs from what was sampled; at 128 turns that "
        "also takes half of the time.",
        answer="answered",
        what="Token ids are the truth: a ledger that only grows, of which the ranks get the ids.",
        proofs=(
            Proof(
                test="tests/complaints/test_fixes.py"
                "::test_sampled_tokens_come_back_as_they_were_sampled",
                disabled="history is tokenised again",
            ),
        ),
    ),
    Complaint(
        row=34,
        threads=(
            "rllm-org/rllm#575",
            "Trinity-RFT #608",
            "OpenRLHF/OpenRLHF#1327",
            "OpenRLHF/OpenRLHF#1252",
            "volcengine/verl#3619",
        ),
        complaint="Answers are cut silently, or the mark that says so is lost. And nobody knows "
        "whether a limit is one of the turn or of the trajectory.",
        answer="answered",
        what="Limits are told apart by name (`sampling.max_tokens` a turn, `model.max_context` a "
        "trajectory), and what was cut says so, in the turn's finish and the end reason.",
        proofs=(
            Proof(
                test="tests/rollout/test_rollout_local.py"
                "::test_a_conversation_that_fills_the_context_ends_with_max_tokens",
                disabled="a full context looks like an end",
            ),
        ),
    ),
    Complaint(
        row=35,
        threads=(
            "THUDM/slime#1370",
            "THUDM/slime#1418",
            "RAGEN #71",
            "Search-R1 #21",
            "volcengine/verl#6376",
        ),
        complaint="Loss masks are off by one or inverted; returns begin anew at the tokens of "
        "tools.",
        answer="answered",
        what="The mask is derived from where each token came from, which the ledger holds.",
        proofs=(
            Proof(
                test="tests/rollout/test_trajectory.py::test_masks_spans_and_returns_are_derived",
                disabled="the loss mask is off by one",
            ),
        ),
    ),
)
