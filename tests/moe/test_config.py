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


def test_the_tiny_preset_is_what_it_says(tiny: tuple[Path, ModelConfig]) -> None:
    config = tiny[1]
    assert (config.num_layers, config.hidden_size, config.num_heads) == (4, 64, 8)
    assert (config.num_experts, config.top_k, config.vocab_size) == (8, 2, 320)
    assert config.qk_norm == (config.architecture == "qwen3_moe")


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
        ({"model_type": "llama"}, "model_type is 'llama'; supported are mixtral, qwen3_moe"),
        ({"model_type": None}, "model_type is None"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map asks for code"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is set"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"use_sliding_window": True, "sliding_window": 128}, "sliding_window is 128"),
        ({"layer_types": ["sliding_attention"]}, "layer_types has sliding_attention"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "'yarn' rotary scaling"),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, "'linear' rotary scaling"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1}}, "'llama3' rotary scaling"),
        ({"rope_theta": None}, "rope_theta is missing"),
        ({"decoder_sparse_step": 2}, "makes some layers dense"),
        ({"mlp_only_layers": [0]}, "makes some layers dense"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1; it must be a positive integer"),
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
