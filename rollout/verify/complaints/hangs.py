"""Hangs and deadlocks."""

from __future__ import annotations

from .complaint import Complaint, Proof

COMPLAINTS = (
    Complaint(
        row=1,
        threads=("volcengine/verl#2445",),
        complaint="A multi-turn job never ends: a barrier of half an hour runs out because one "
        "rank is twenty minutes behind, and nobody says which.",
        answer="answered",
        what="No barrier over episodes: each trajectory is delivered when it ends. A rank that "
        "holds up a collective beyond its deadline is named on every rank, as SLOW or BLOCKED.",
        proofs=(
            Proof(
                test="tests/comm/test_watchdog.py"
                "::test_a_rank_that_gets_on_but_not_in_time_is_slow",
                disabled="a diagnosis blames nobody",
            ),
        ),
    ),
    Complaint(
        row=2,
        threads=("volcengine/verl#340",),
        complaint="Generation with tools hangs at random.",
        answer="answered",
        what="Every request to an environment has a deadline; whoever passes it is ended with its "
        "process, and the other episodes of that process are replayed.",
        proofs=(
            Proof(
                test="tests/envs/test_hostile_environments.py"
                "::test_a_hang_ends_at_its_deadline_and_neighbours_are_replayed[Sleeps]",
                disabled="requests to environments have no deadline",
                hangs=True,
            ),
        ),
    ),
    Complaint(
        row=3,
        threads=("volcengine/verl#5815", "volcengine/verl#3895"),
        complaint="A fully asynchronous job stands still with idle GPUs, and nothing tells why.",
        answer="answered",
        what="A watchdog thread in each rank watches progress, not activity. Its one error says "
        "who waits for whom, and in which line of code a rank stands still.",
        proofs=(
            Proof(
                test="tests/comm/test_watchdog.py"
                "::test_a_rank_that_stands_still_is_blocked_and_the_place_is_named[sleeps-sleeps]",
                disabled="nobody looks where a rank stands",
            ),
        ),
    ),
    Complaint(
        row=4,
        threads=("volcengine/verl#3873",),
        complaint="The second rollout ends in a timeout of NCCL, long after ranks have issued "
        "different collectives.",
        answer="answered",
        what="Nothing is posted that is not the agreed ticket's: the rank that asks for another "
        "collective is refused before it posts, by name.",
        proofs=(
            Proof(
                test="tests/comm/test_sequencer.py::test_the_kind_of_collective_is_checked_too",
                disabled="a request is posted whatever its ticket says",
            ),
        ),
    ),
    Complaint(
        row=5,
        threads=("NovaSky-AI/SkyRL#1173",),
        complaint="A buffer stays at 125 of 128 for a day: the failure of a task was swallowed, "
        "and nobody has a timeout.",
        answer="answered",
        what="Each task ends in exactly one trajectory with one end reason, a failed one too.",
        proofs=(
            Proof(
                test="tests/rollout/test_hostile_inputs.py"
                "::test_tasks_that_cannot_begin_are_recorded_and_others_go_on",
                disabled="failed episodes vanish",
            ),
        ),
    ),
    Complaint(
        row=6,
        threads=("NovaSky-AI/SkyRL#1691",),
        complaint="An engine dies inside a background task; the trainer waits for ever.",
        answer="answered",
        what="A rank's failure wakes everybody who waits for a turn, with one typed error.",
        proofs=(
            Proof(
                test="tests/rollout/test_turns.py"
                "::test_a_rank_that_fails_wakes_everybody_with_one_error",
                disabled="a rank's failure is not passed on",
            ),
        ),
    ),
    Complaint(
        row=7,
        threads=("PrimeIntellect-ai/prime-rl#1713",),
        complaint="Random hangs; the control loop lags by up to 700 s behind work that it shares "
        "its thread with.",
        answer="partly",
        what="Ranks have processes of their own, and a user's reward function runs in a thread "
        "beside the collector's loop. Tokenising is done in the loop, and its lag is not shown.",
        proofs=(
            Proof(
                test="tests/complaints/test_fixes.py"
                "::test_episodes_go_on_while_a_reward_function_takes_its_time",
                disabled="reward functions run in the collector's loop",
            ),
        ),
    ),
    Complaint(
        row=8,
        threads=(
            "PrimeIntellect-ai/prime-rl#1667",
            "PrimeIntellect-ai/prime-rl#2337",
            "PrimeIntellect-ai/prime-rl#3030",
        ),
        complaint="Broadcasting weights deadlocks, over a checkpoint that was skipped or a mark "
        "that came too early.",
        answer="answered",
        what="An update has two phases, each with a deadline: every rank says that it holds the "
        "version complete and checked, then all are told to use it. It names who is missing.",
        proofs=(
            Proof(
                test="tests/weights/test_publisher.py"
                "::test_a_rank_that_is_silent_is_an_error_at_the_deadline",
                disabled="an update waits for ranks for ever",
                hangs=True,
            ),
        ),
    ),
    Complaint(
        row=9,
        threads=(
            "PrimeIntellect-ai/prime-rl#2099",
            "PrimeIntellect-ai/prime-rl#2325",
            "vllm-project/vllm#32103",
        ),
        complaint="Ranks that share experts pause for an update in different steps, and the "
        "dummy batches of one meet the real ones of another.",
        answer="answered",
        what="Versions change in a step that all ranks have agreed on, once the last of them is "
        "ready. A rank without rows walks the same plan as the others.",
        proofs=(
            Proof(
                test="tests/comm/test_plan.py"
                "::test_a_rank_that_is_not_ready_holds_the_update_back_even_if_it_leads_nobody",
                disabled="the first rank that holds a version decides",
            ),
        ),
    ),
    Complaint(
        row=10,
        threads=(
            "huggingface/trl#6797",
            "huggingface/trl#6796",
            "huggingface/trl#6913",
            "huggingface/trl#3608",
            "huggingface/trl#2923",
        ),
        complaint="Groups for the transfer of weights hang for ever where not everybody appears, "
        "or ranks mean different groups.",
        answer="answered",
        what="Joining has a deadline, and every group says whom it means before the first step. A "
        "trainer's group is made for one update, checks its version and size, and every wait in "
        "it has a deadline.",
        proofs=(
            Proof(
                test="tests/comm/test_warm.py"
                "::test_ranks_that_mean_different_groups_are_told_so_before_the_first_step",
                disabled="groups are not tried before the first step",
            ),
        ),
    ),
    Complaint(
        row=11,
        threads=("sgl-project/sglang#33289", "vllm-project/vllm#48720"),
        complaint="Decisions that ranks make from their own numbers end in a deadlock; a check of "
        "every step is proposed, a recorder of what each rank issued.",
        answer="answered",
        what="Both are there, always: a step begins with an exchange that makes one plan of all "
        "ranks' numbers and compares hashes of all that was issued.",
        proofs=(
            Proof(
                test="tests/comm/test_negative_controls.py"
                "::test_the_exchange_finds_plans_made_from_local_numbers_even_where_they_do_not"
                "_hang",
                disabled="hashes are not compared",
            ),
        ),
    ),
    Complaint(
        row=12,
        threads=(
            "pytorch/torchrec#4149",
            "sgl-project/sglang#15771",
            "pytorch/torchtitan#3877",
        ),
        complaint="Within each group the order is right, and yet ranks hang: they take the groups "
        "themselves in a different order.",
        answer="answered",
        what="One order over all groups: it is in every hash, and a witness on each rank refuses a "
        "post that comes behind a later one, on whatever communicator.",
        proofs=(
            Proof(
                test="tests/comm/test_negative_controls.py"
                "::test_a_swap_beneath_the_plan_is_found_by_the_hashes_in_the_next_exchange",
                disabled="hashes count each group for itself",
            ),
            Proof(
                test="tests/comm/test_post_order.py"
                "::test_a_post_out_of_order_is_refused_and_both_tickets_are_named",
                disabled="the witness does not look at the order",
            ),
        ),
    ),
    Complaint(
        row=13,
        threads=(
            "vllm-project/vllm#44428",
            "vllm-project/vllm#46370",
            "vllm-project/vllm#38862",
            "vllm-project/vllm#27774",
        ),
        complaint="One rank that shares experts dies, and all others hang.",
        answer="answered",
        what="Its end is seen at once and is everybody's error, with the verdict DEAD; what has "
        "been collected is in the results file.",
        proofs=(
            Proof(
                test="tests/comm/test_watchdog.py::test_a_process_that_has_ended_is_dead_at_once",
                disabled="a process that has ended looks alive",
            ),
            Proof(
                test="tests/rollout/test_store.py"
                "::test_an_error_leaves_what_was_collected_as_partial",
                disabled="an error takes what was collected with it",
            ),
        ),
    ),
    Complaint(
        row=14,
        threads=("sgl-project/sglang#37904", "sgl-project/sglang#37905"),
        complaint="Prefill and decode, multiplexed on one GPU, take locks from one workspace: a "
        "deadlock with busy cores, at which the watchdog stays silent.",
        answer="answered",
        what="Each path has its own workspace, communicators and stream; a walk over all that both "
        "can reach finds nothing in common but weights and the KV pool.",
        proofs=(
            Proof(
                test="tests/rollout/test_isolation.py"
                "::test_paths_share_nothing_mutable_but_weights_and_the_kv_pool[gloo]",
                disabled="all paths of a rank lend the same buffers",
            ),
        ),
    ),
    Complaint(
        row=15,
        threads=("volcengine/verl#288",),
        complaint="Code in a sandbox loops for ever and takes no notice of asyncio's timeout.",
        answer="answered",
        what="Code runs in a process of its own that is killed when its time is over.",
        proofs=(
            Proof(
                test="tests/envs/test_python_tool.py"
                "::test_what_takes_too_long_is_stopped_and_a_fresh_process_follows",
                disabled="code has no deadline",
                hangs=True,
            ),
        ),
    ),
)
