"""Sizes of vLLM's blocks are tried once for a folder."""

from __future__ import annotations

from tests.peers.made import ARMS, figures

from interlace.rollout.ablation.bench import Run
from interlace.rollout.peers.block_size import tried_sizes, with_soonest_size
from interlace.rollout.peers.contestants import settings_of


def runner(seconds):
    """Makes runs that take so long; None: it fails."""
    made = []

    def run(arm):
        made.append(arm.name)
        took = seconds[settings_of(arm).get("block_size")]
        return Run(
            arm=arm,
            repeat=0,
            figures=None if took is None else figures(took),
            error="no such size" if took is None else None,
            load=0.0,
            void=False,
        )

    return run, made


def test_the_soonest_size_is_used_and_stays(tmp_path):
    run, made = runner({None: 5.0, 16: None, 32: 4.0})
    tried = tried_sizes(tmp_path, run)
    assert made == [f"vllm-2-threads-block-{word}" for word in ("default", "16", "32")]
    assert tried["16"] == {"error": "no such size"}
    arms = with_soonest_size([ARMS["interlace-serial"], ARMS["vllm-tp2"]], tried)
    assert [settings_of(arm).get("block_size") for arm in arms[1:]] == [32]
    assert arms[0] == ARMS["interlace-serial"]
    again, made_again = runner({None: 1.0, 16: 1.0, 32: 9.0})
    assert tried_sizes(tmp_path, again) == tried
    assert made_again == []


def test_where_all_have_failed_they_are_tried_again(tmp_path):
    fails, _ = runner({None: None, 16: None, 32: None})
    tried = tried_sizes(tmp_path, fails)
    assert with_soonest_size([ARMS["vllm-tp2"]], tried) == [ARMS["vllm-tp2"]]
    works, made = runner({None: 3.0, 16: 4.0, 32: 5.0})
    tried = tried_sizes(tmp_path, works)
    assert len(made) == 3
    assert with_soonest_size([ARMS["vllm-tp2"]], tried) == [ARMS["vllm-tp2"]]
