"""What read_config understands, and what it refuses and how."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from interlace.moe.config import ModelConfig, read_config
from interlace.moe.errors import ModelError


def edited(folder: Path, target: Path, **changes: Any) -> Path:
    """A folder with only a config.json: that of `folder` with `changes`; None removes a field."""
    raw = json.loads((folder / "config.json").read_text())
    raw |= changes
    target.mkdir()
    kept = {key: value for key, value in raw.items() if value is not None}
    (target / "config.json").write_text(json.dumps(kept))
    return target


def test_both_spellings_of_a_config_are_one_model(
    tiny_folders: dict[str, Path], tmp_path: Path
) -> None:
    source = tiny_folders["qwen3_moe"]
    newer = edited(
        source,
        tmp_path / "newer",
        num_experts=None,
        num_local_experts=8,
        rope_theta=None,
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
        torch_dtype=None,
        dtype="float32",
    )
    older = edited(source, tmp_path / "older")
    assert read_config(newer) == read_config(older)


def test_the_tiny_preset_is_what_it_says(tiny_folders: dict[str, Path]) -> None:
    config = read_config(tiny_folders["qwen3_moe"])
    assert (config.num_layers, config.hidden_size, config.attention.num_heads) == (4, 64, 8)
    assert (config.num_experts, config.top_k, config.vocab_size) == (8, 2, 320)


def test_a_tiny_model_has_experts_where_its_architecture_has(
    tiny: tuple[Path, ModelConfig],
) -> None:
    config = tiny[1]
    every = tuple(range(config.num_layers))
    dense_first = ("qwen2_moe", "deepseek_v2", "deepseek_v3")
    expected = every[1:] if config.architecture in dense_first else every
    dense = config.architecture in ("llama", "qwen3")
    assert config.moe_layers == (() if dense else expected)
    assert (config.num_experts, config.top_k) == ((0, 0) if dense else (8, 2))
    assert (config.dense_size > 0) == (len(config.moe_layers) < config.num_layers)


def test_some_layers_may_be_dense(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    source = tiny_folders["qwen3_moe"]
    every_other = read_config(edited(source, tmp_path / "a", decoder_sparse_step=2))
    assert every_other.moe_layers == (1, 3)
    named = read_config(edited(source, tmp_path / "b", mlp_only_layers=[0, 3]))
    assert named.moe_layers == (1, 2)
    none = read_config(edited(source, tmp_path / "c", mlp_only_layers=[0, 1, 2, 3]))
    assert (none.mixture, none.num_experts, none.num_moe_layers) == (None, 0, 0)
    first = read_config(edited(tiny_folders["deepseek_v3"], tmp_path / "d"))
    assert first.moe_layers == (1,)


def test_end_tokens_come_from_the_generation_config_first(
    tiny_folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = edited(tiny_folders["mixtral"], tmp_path / "m", eos_token_id=5)
    assert read_config(folder).eos_token_ids == (5,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert read_config(folder).eos_token_ids == (7, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'; supported are mixtral, qwen3_moe, qwen2"),
        ({"model_type": None}, "model_type is None"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map asks for code"),
        ({"quantization_config": {"bits": 4}}, "supported are float32, bfloat16 and float16"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"mlp_bias": True}, "mlp_bias is true"),
        ({"clip_qkv": 8.0}, "clip_qkv is set"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"use_sliding_window": True, "sliding_window": 128}, "sliding_window is 128"),
        ({"layer_types": ["sliding_attention"]}, "layer_types has sliding_attention"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, "'linear' rotary scaling; supported"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope' rotary scaling"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is set"),
        ({"rope_theta": None}, "rope_theta is missing"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0; it must be a positive integer"),
        ({"mlp_only_layers": [-1]}, "mlp_only_layers is [-1]; it must be a list of layers"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1; it must be a positive integer"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; at most 4096"),
        ({"hidden_size": 4, "head_dim": None}, "head_dim is 0; it must be a positive integer"),
        ({"hidden_size": 64.5}, "hidden_size is 64.5; it must be a positive integer"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"num_experts": None}, "num_experts or num_local_experts is missing"),
        ({"num_experts_per_tok": 9}, "more than the 8 experts"),
        ({"num_attention_heads": 6}, "no multiple of num_key_value_heads 4"),
        ({"head_dim": 31}, "head_dim 31 is odd"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob is 'yes'"),
        ({"torch_dtype": "float8"}, "dtype is 'float8'"),
        ({"eos_token_id": "end"}, "eos_token_id is 'end'"),
    ],
)
def test_what_cannot_run_is_refused_by_field(
    tiny_folders: dict[str, Path], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = edited(tiny_folders["qwen3_moe"], tmp_path / "m", **changes)
    with pytest.raises(ModelError, match=re.escape(message)) as caught:
        read_config(folder)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'; supported are"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob is true"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func must be sigmoid"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq must be 1"),
        ("deepseek_v3", {"n_group": 3}, "n_group 3 does not divide 8 experts"),
        ("deepseek_v3", {"topk_group": 1, "num_experts_per_tok": 3}, "cannot hold 3 experts"),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim 7 is odd"),
        ("granitemoe", {"residual_multiplier": -1}, "residual_multiplier is -1"),
        ("qwen2_moe", {"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size"),
        ("llama", {"intermediate_size": None}, "intermediate_size is missing"),
    ],
)
def test_what_one_architecture_cannot_be_is_refused_by_field(
    tiny_folders: dict[str, Path],
    tmp_path: Path,
    architecture: str,
    changes: dict[str, Any],
    message: str,
) -> None:
    folder = edited(tiny_folders[architecture], tmp_path / "m", **changes)
    with pytest.raises(ModelError, match=re.escape(message)):
        read_config(folder)


def test_an_adapter_and_a_gguf_file_are_refused_with_what_is_supported(
    tiny_folders: dict[str, Path], tmp_path: Path
) -> None:
    adapter = edited(tiny_folders["llama"], tmp_path / "adapter")
    (adapter / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"LoRA adapter; supported are whole models: merge it"):
        read_config(adapter)
    (tmp_path / "m-Q4.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"m-Q4\.gguf: GGUF files are not read; supported are"):
        read_config(tmp_path)


def test_a_window_as_long_as_the_model_is_no_window(
    tiny_folders: dict[str, Path], tmp_path: Path
) -> None:
    read_config(edited(tiny_folders["mixtral"], tmp_path / "m", sliding_window=2048))
    short = edited(tiny_folders["mixtral"], tmp_path / "short", sliding_window=2047)
    with pytest.raises(ModelError, match="sliding_window is 2047"):
        read_config(short)


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[1]", b""])
def test_a_config_that_is_no_object_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json: (not valid JSON|holds a list)"):
        read_config(tmp_path)


def test_a_missing_folder_and_a_missing_config_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        read_config(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"config\.json: missing"):
        read_config(tmp_path)
