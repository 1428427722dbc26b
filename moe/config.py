"""A Mixture-of-Experts model's description, read from a Hugging Face folder. No torch here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ModelError

ARCHITECTURES = ("mixtral", "qwen3_moe")
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes and constants of one model; every field is checked, so nothing below has a default."""

    architecture: str
    """`model_type` of config.json: one of `ARCHITECTURES`."""
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    top_k: int
    """Experts each token goes to in every layer."""
    expert_size: int
    """Width of one expert's hidden layer."""
    vocab_size: int
    rms_eps: float
    rope_theta: float
    norm_topk: bool
    """Whether the weights of the chosen experts are scaled to sum to one."""
    qk_norm: bool
    """Whether queries and keys are normalised per head."""
    max_positions: int
    tie_embeddings: bool
    eos_token_ids: tuple[int, ...]
    dtype: str
    """The checkpoint's own type: one of `DTYPES` (float16 checkpoints run as float32)."""


def read_config(folder: Path) -> ModelConfig:
    """The model in `folder`, or a `ModelError` that says what this runtime cannot run.

    Reads config.json in the hub's spelling (`num_experts`, `rope_theta`, `torch_dtype`) and in
    that of transformers 5 (`num_local_experts`, `rope_parameters`, `dtype`); end-of-text tokens
    come from generation_config.json where there is one. Nothing is executed and no weight opened.
    """
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such folder; a model is a folder with config.json")
    path = folder / "config.json"
    raw = _read_json(path)
    fields = _Fields(path, raw)
    architecture = fields.architecture()
    fields.refuse_unsupported()
    qwen = architecture == "qwen3_moe"
    num_heads = fields.count("num_attention_heads")
    hidden_size = fields.count("hidden_size")
    config = ModelConfig(
        architecture=architecture,
        num_layers=fields.count("num_hidden_layers"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=fields.count("num_key_value_heads"),
        head_dim=fields.count("head_dim", default=hidden_size // num_heads),
        num_experts=fields.count("num_experts", "num_local_experts"),
        top_k=fields.count("num_experts_per_tok"),
        expert_size=fields.count("moe_intermediate_size" if qwen else "intermediate_size"),
        vocab_size=fields.count("vocab_size"),
        rms_eps=fields.positive("rms_norm_eps"),
        rope_theta=fields.rope_theta(),
        norm_topk=fields.flag("norm_topk_prob", default=False) if qwen else True,
        qk_norm=qwen,
        max_positions=fields.count("max_position_embeddings"),
        tie_embeddings=fields.flag("tie_word_embeddings", default=False),
        eos_token_ids=_eos_token_ids(folder, raw),
        dtype=fields.dtype(),
    )
    _check_sizes(path, config)
    return config


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


class _Fields:
    """The fields of one config.json; every read is checked and every error names file and field."""

    def __init__(self, path: Path, raw: Mapping[str, Any]) -> None:
        self._path = path
        self._raw = raw

    def architecture(self) -> str:
        found = self._raw.get("model_type")
        if found not in ARCHITECTURES:
            raise self._error(
                "model_type", f"is {found!r}; supported are {', '.join(ARCHITECTURES)}"
            )
        return str(found)

    def count(self, *keys: str, default: int | None = None) -> int:
        """A positive integer under the first of `keys` that is there."""
        key = next((k for k in keys if self._raw.get(k) is not None), keys[0])
        found = self._raw.get(key)
        if found is None and default is not None:
            return default
        if found is None:
            raise self._error(" or ".join(keys), "is missing")
        if isinstance(found, bool) or not isinstance(found, int) or found < 1:
            raise self._error(key, f"is {found!r}; it must be a positive integer")
        return found

    def positive(self, key: str) -> float:
        found = self._raw.get(key)
        if found is None:
            raise self._error(key, "is missing")
        if isinstance(found, bool) or not isinstance(found, int | float) or not found > 0:
            raise self._error(key, f"is {found!r}; it must be a positive number")
        return float(found)

    def flag(self, key: str, *, default: bool) -> bool:
        found = self._raw.get(key)
        if found is None:
            return default
        if not isinstance(found, bool):
            raise self._error(key, f"is {found!r}; it must be true or false")
        return found

    def dtype(self) -> str:
        found = self._raw.get("dtype") or self._raw.get("torch_dtype") or "float32"
        if found == "float16":
            return "float32"
        if found not in DTYPES:
            raise self._error("dtype", f"is {found!r}; supported are {', '.join(DTYPES)}, float16")
        return str(found)

    def rope_theta(self) -> float:
        for key in ("rope_parameters", "rope_scaling"):
            rope = self._raw.get(key)
            if rope is None:
                continue
            if not isinstance(rope, dict):
                raise self._error(key, f"is {rope!r}; it must be an object")
            kind = rope.get("rope_type", rope.get("type", "default"))
            if kind != "default":
                raise self._error(key, f"asks for {kind!r} rotary scaling; only plain is supported")
            if "rope_theta" in rope:
                return _Fields(self._path, rope).positive("rope_theta")
        return self.positive("rope_theta")

    def refuse_unsupported(self) -> None:
        raw = self._raw
        if raw.get("auto_map"):
            raise self._error(
                "auto_map",
                "asks for code from the model folder, which is never run; use a checkpoint of a "
                "built-in architecture",
            )
        if raw.get("quantization_config"):
            raise self._error("quantization_config", "is set; use the unquantised checkpoint")
        if raw.get("attention_bias"):
            raise self._error("attention_bias", "is true; biases in attention are not supported")
        if raw.get("hidden_act", "silu") != "silu":
            raise self._error("hidden_act", f"is {raw['hidden_act']!r}; only silu is supported")
        if raw.get("decoder_sparse_step", 1) != 1 or raw.get("mlp_only_layers"):
            raise self._error(
                "decoder_sparse_step or mlp_only_layers",
                "makes some layers dense; every layer must have experts",
            )
        self._refuse_sliding_window()

    def _refuse_sliding_window(self) -> None:
        raw = self._raw
        window = raw.get("sliding_window")
        if not raw.get("use_sliding_window", raw.get("model_type") == "mixtral"):
            window = None
        if "sliding_attention" in (raw.get("layer_types") or ()):
            raise self._error("layer_types", "has sliding_attention; only full attention is run")
        if window is not None and window < self.count("max_position_embeddings"):
            raise self._error(
                "sliding_window",
                f"is {window}: attention would need a window; set it to null to attend to all "
                f"positions, if the model was trained so",
            )

    def _error(self, field: str, what: str) -> ModelError:
        return ModelError(f"{self._path}: {field} {what}")


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


def _check_sizes(path: Path, config: ModelConfig) -> None:
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"{path}: num_attention_heads {config.num_heads} is no multiple of "
            f"num_key_value_heads {config.num_kv_heads}"
        )
    if config.head_dim % 2:
        raise ModelError(f"{path}: head_dim {config.head_dim} is odd; rotary positions need pairs")
    if config.top_k > config.num_experts:
        raise ModelError(
            f"{path}: num_experts_per_tok {config.top_k} is more than the "
            f"{config.num_experts} experts there are"
        )
