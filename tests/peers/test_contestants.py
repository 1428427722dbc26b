"""Who takes part, and how its processes start."""

from __future__ import annotations

import json

import pytest
from tests.peers.made import ARMS

from interlace.rollout.config import ConfigError
from interlace.rollout.peers.contestants import (
    PEERS,
    VLLM_USUAL,
    family_of,
    launches,
    parse_arms,
    parse_peers,
    record_of,
    settings_of,
    version_of,
    why_absent,
    with_block_size,
)
from interlace.rollout.peers.request import PeersRequest
from interlace.rollout.peers.workload import Shape


def test_peers_are_named_once_each():
    assert parse_peers(None) == list(PEERS)
    assert parse_peers("llama-cpp, vllm") == ["llama-cpp", "vllm"]
    with pytest.raises(ConfigError, match="no peer 'sglang': name vllm, transformers, llama-cpp"):
        parse_peers("vllm,sglang")
    with pytest.raises(ConfigError, match="vllm is there twice"):
        parse_peers("vllm,vllm")


def test_arms_can_be_named_and_keep_their_order():
    families = ["interlace", "vllm"]
    every = parse_arms(None, families)
    assert [arm.name for arm in every[:3]] == [
        "interlace-multiplexed",
        "interlace-serial",
        "interlace-chunked",
    ]
    two = parse_arms("vllm-tp2, interlace-serial", families)
    assert [arm.name for arm in two] == ["interlace-serial", "vllm-tp2"]
    with pytest.raises(ConfigError, match="no arm 'llama-cpp': name interlace-multiplexed, "):
        parse_arms("llama-cpp", families)


def test_every_arm_has_a_family():
    families = {name: family_of(arm) for name, arm in ARMS.items()}
    assert families["vllm-2-processes"] == "vllm"
    assert families["interlace-serial"] == "interlace"
    assert set(families.values()) == {"interlace", *PEERS}


def test_a_peer_is_absent_until_a_record_says_its_version(tmp_path):
    assert why_absent(tmp_path, "vllm") == "it is not installed: run make peers"
    record_of(tmp_path, "vllm").write_text(json.dumps({"absent": "no wheel"}))
    assert why_absent(tmp_path, "vllm") == "no wheel"
    record_of(tmp_path, "vllm").write_text(json.dumps({"version": "vllm 1"}))
    assert why_absent(tmp_path, "vllm") is None
    assert version_of(tmp_path, "vllm") == "vllm 1"


def test_vllm_is_bound_to_cores_as_its_way_asks(tmp_path):
    def bound(name):
        found = launches(ARMS[name], tmp_path, (2, 5))
        return [one.environ["VLLM_CPU_OMP_THREADS_BIND"] for one in found]

    assert bound("vllm-2-threads") == ["2,5"]
    assert bound("vllm-tp2") == ["2|5"]
    assert bound("vllm-2-processes") == ["2", "5"]
    first, second = launches(ARMS["vllm-2-processes"], tmp_path, (2, 5))
    assert first.command[:3] == ("taskset", "-c", "2")
    assert second.command[:3] == ("taskset", "-c", "5")
    assert first.command[-1].endswith("peers/vllm_engine.py")


def test_what_vllm_has_compiled_with_tiles_is_not_run_without(tmp_path):
    def kept(tiles):
        (one,) = launches(ARMS["vllm-tp2"], tmp_path, (0, 1), tiles=tiles)
        return one.environ["VLLM_CACHE_ROOT"]

    assert kept(True) != kept(False)


def test_a_block_size_is_a_setting_more():
    tuned = with_block_size(ARMS["vllm-tp2"], 16, "vllm-tp2")
    assert settings_of(tuned) == {"tensor_parallel_size": 2, "block_size": 16}
    assert with_block_size(VLLM_USUAL, None, VLLM_USUAL.name) == VLLM_USUAL


def test_llama_cpp_has_one_checkpoint(tmp_path):
    record_of(tmp_path, "llama-cpp").write_text(json.dumps({"version": "1"}))
    assert PeersRequest(installed=tmp_path).why_absent("llama-cpp") is None
    other = PeersRequest(installed=tmp_path, model="tiny-qwen3-moe")
    assert other.why_absent("llama-cpp") == (
        "its checkpoint is bench-qwen3-moe, and the model is tiny-qwen3-moe"
    )
    assert other.why_absent("vllm") == "it is not installed: run make peers"


def test_a_request_comes_back_from_json(tmp_path):
    shape = Shape(num_trajectories=3, batches=(1, 2))
    one = PeersRequest(installed=tmp_path, shape=shape, overrides=("mode=serial",), tiles=False)
    assert PeersRequest.from_json(json.loads(json.dumps(one.as_json()))) == one
