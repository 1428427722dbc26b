"""A model's description, read from a Hugging Face folder. No torch here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .architectures import read_attention, read_mixture, read_moe_layers, read_multipliers
from .config_fields import Fields
from .errors import ModelError
from .parts import Attention, GroupedQuery, Mixture, Multipliers, Rotary
from .rotary_fields import read_rotary

ARCHITECTURES = (
    "mixtral",
    "qwen3_moe",
    "qwen2_moe",
    "granitemoe",
    "olmoe",
    "deepseek_v2",
    "deepseek_v3",
    "llama",
    "qwen3",
)
DTYPES = ("float32", "bfloat16")
MAX_LAYERS = 4096
"""A config.json that asks for more is damaged; every layer's tensors are listed before any is
read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes and constants of one model; every field is checked, so nothing below has a default."""

    architecture: str
    """`model_type` of config.json: one of `ARCHITECTURES`."""
    num_layers: int
    hidden_size: int
    attention: Attention
    mixture: Mixture | None
    """The experts of the layers in `moe_layers`; None: no layer has any."""
    moe_layers: tuple[int, ...]
    """Ascending; the other layers are dense."""
    dense_size: int
    """Width of a dense layer's hidden layer; 0 where all layers have experts."""
    vocab_size: int
    rms_eps: float
    rotary: Rotary
    multipliers: Multipliers
    max_positions: int
    tie_embeddings: bool
    eos_token_ids: tuple[int, ...]
    dtype: str
    """The checkpoint's own type: one of `DTYPES` (float16 checkpoints run as float32)."""
    num_prediction_layers: int
    """Layers behind the last one that predict further tokens; the checkpoint may hold them, they
    are not run."""

    @property
    def num_experts(self) -> int:
        return self.mixture.num_experts if self.mixture else 0

    @property
    def top_k(self) -> int:
        """Experts each token goes to in every layer that has some."""
        return self.mixture.router.top_k if self.mixture else 0

    @property
    def num_moe_layers(self) -> int:
        return len(self.moe_layers)


def read_config(folder: Path) -> ModelConfig:
    """The model in `folder`, or a `ModelError` that says what this runtime cannot run.

    Reads config.json in the hub's spelling (`num_experts`, `rope_theta`, `torch_dtype`) and in
    that of transformers 5 (`num_local_experts`, `rope_parameters`, `dtype`); end-of-text tokens
    come from generation_config.json where there is one. Nothing is executed and no weight opened.
    """
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such folder; a model is a folder with config.json")
    refuse_other_formats(folder)
    path = folder / "config.json"
    raw = _read_json(path)
    fields = Fields(path, raw)
    architecture = raw.get("model_type")
    if architecture not in ARCHITECTURES:
        raise fields.error(
            "model_type", f"is {architecture!r}; supported are {', '.join(ARCHITECTURES)}"
        )
    _refuse_unsupported(architecture, fields)
    num_layers = fields.count("num_hidden_layers")
    if num_layers > MAX_LAYERS:
        raise fields.error("num_hidden_layers", f"is {num_layers}; at most {MAX_LAYERS} are run")
    moe_layers = read_moe_layers(architecture, fields)
    all_moe = len(moe_layers) == num_layers
    return ModelConfig(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=fields.count("hidden_size"),
        attention=read_attention(architecture, fields),
        mixture=read_mixture(architecture, fields) if moe_layers else None,
        moe_layers=moe_layers,
        dense_size=0 if all_moe else fields.count("intermediate_size"),
        vocab_size=fields.count("vocab_size"),
        rms_eps=fields.positive("rms_norm_eps"),
        rotary=read_rotary(fields),
        multipliers=read_multipliers(architecture, fields),
        max_positions=fields.count("max_position_embeddings"),
        tie_embeddings=fields.flag("tie_word_embeddings", default=False),
        eos_token_ids=_eos_token_ids(folder, raw),
        dtype=_dtype(fields),
        num_prediction_layers=fields.whole("num_nextn_predict_layers", default=0),
    )


def check_tp_size(config: ModelConfig, tp_size: int) -> None:
    """Raises ValueError unless every rank gets the same number of whole heads."""
    if isinstance(config.attention, GroupedQuery):
        num, kind = config.attention.num_kv_heads, "key/value heads"
    else:
        num, kind = config.attention.num_heads, "query heads"
    if num % tp_size:
        raise ValueError(f"tensor parallelism of {tp_size} cannot divide {num} {kind}")


def refuse_other_formats(folder: Path) -> None:
    """Raises `ModelError` for a folder that holds a LoRA adapter or only a GGUF file."""
    if (folder / "adapter_config.json").exists():
        raise ModelError(
            f"{folder}: adapter_config.json makes it a LoRA adapter; supported are whole models: "
            f"merge it into its base model (peft's merge_and_unload) and save that"
        )
    quantised = sorted(folder.glob("*.gguf"))
    if quantised and not (folder / "config.json").exists():
        raise ModelError(
            f"{quantised[0]}: GGUF files are not read; supported are safetensors with float32, "
            f"bfloat16 or float16 weights and their config.json"
        )


def _refuse_unsupported(architecture: str, fields: Fields) -> None:
    if fields.get("auto_map") and architecture not in ("deepseek_v2", "deepseek_v3"):
        raise fields.error(
            "auto_map",
            "asks for code from the model folder, which is never run; use a checkpoint of a "
            "built-in architecture",
        )
    if fields.get("quantization_config"):
        raise fields.error(
            "quantization_config",
            "is set; supported are float32, bfloat16 and float16 weights: use the unquantised "
            "checkpoint",
        )
    for key in ("attention_bias", "mlp_bias"):
        if fields.get(key):
            raise fields.error(key, "is true; such biases are not supported")
    if fields.get("hidden_act") not in (None, "silu"):
        raise fields.error("hidden_act", f"is {fields.get('hidden_act')!r}; only silu is supported")
    if "sliding_attention" in (fields.get("layer_types") or ()):
        raise fields.error("layer_types", "has sliding_attention; only full attention is run")
    window = fields.get("sliding_window")
    used = fields.get("use_sliding_window")
    used = architecture == "mixtral" if used is None else used
    if used and window is not None and window < fields.count("max_position_embeddings"):
        raise fields.error(
            "sliding_window",
            f"is {window}: attention would need a window; set it to null to attend to all "
            f"positions, if the model was trained so",
        )


def _dtype(fields: Fields) -> str:
    found = fields.get("dtype") or fields.get("torch_dtype") or "float32"
    if found == "float16":
        return "float32"
    if found not in DTYPES:
        raise fields.error("dtype", f"is {found!r}; supported are {', '.join(DTYPES)}, float16")
    return str(found)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{path}: missing; a model folder needs it") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON ({error}); download the file again") from None
    if not isinstance(raw, dict):
        raise ModelError(f"{path}: holds a {type(raw).__name__}, not a JSON object")
    return raw


def _eos_token_ids(folder: Path, raw: Mapping[str, Any]) -> tuple[int, ...]:
    path = folder / "generation_config.json"
    found = _read_json(path).get("eos_token_id") if path.exists() else None
    if found is None:
        path, found = folder / "config.json", raw.get("eos_token_id")
    if found is None:
        return ()
    ids = tuple(found) if isinstance(found, list) else (found,)
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ModelError(f"{path}: eos_token_id is {found!r}; it must be token ids")
    return ids
