"""Where built models live between runs, and how a name becomes a folder."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from interlace.moe.config import ARCHITECTURES, refuse_other_formats
from interlace.moe.errors import ModelError
from interlace.moe.random_model import write_random_model
from interlace.moe.smollm2 import build_smollm2_moe
from interlace.rollout.config import ConfigError

Progress = Callable[[int, int], None]

SMOLLM2 = "smollm2-moe"
TINY_MODELS = {f"tiny-{name.replace('_', '-')}": name for name in ARCHITECTURES}
BENCH_MODEL = "bench-qwen3-moe"
BENCH_SIZES: Mapping[str, int | str] = {
    "num_layers": 8,
    "hidden_size": 512,
    "num_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 64,
    "num_experts": 16,
    "top_k": 4,
    "expert_size": 512,
    "vocab_size": 8192,
    "max_positions": 32768,
    "dtype": "bfloat16",
    "embedding_factor": 60,
}
"""114M parameters, 38M of them for a token: large enough that kernels and not Python take the time,
small enough for two cores. Its experts are about evenly loaded, as training makes them: of two
ranks the busier has 7 % more rows than half in chunks of 58 tokens; chance alone would give 5."""
MODEL_NAMES = (SMOLLM2, BENCH_MODEL, *TINY_MODELS)


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """`INTERLACE_CACHE`, else `XDG_CACHE_HOME`/interlace, else ~/.cache/interlace."""
    if own := environ.get("INTERLACE_CACHE"):
        return Path(own).expanduser()
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "interlace"


def model_folder(name_or_path: str) -> Path:
    """A folder with a complete model; a named one is built into the cache if it is not there.

    ConfigError if there is no such folder or no model in it. Processes may call this at once for
    one name: each builds for itself, the first to finish publishes, and all get the same folder.
    """
    if name_or_path in MODEL_NAMES:
        folder = cache_folder() / "models" / name_or_path
        if not is_model(folder):
            build_model(name_or_path, folder)
        return folder
    folder = Path(name_or_path).expanduser()
    if not folder.is_dir():
        raise ConfigError(
            f"model.path: there is no folder {name_or_path}: give a folder in Hugging Face format "
            f"or one of {', '.join(MODEL_NAMES)}"
        )
    try:
        refuse_other_formats(folder)
    except ModelError as error:
        raise ConfigError(f"model.path: {error}") from None
    if not is_model(folder):
        raise ConfigError(
            f"model.path: {name_or_path} has no config.json: it is not a folder in Hugging Face "
            "format"
        )
    return folder


def is_model(folder: Path) -> bool:
    """Whether `folder` holds a model: built ones appear complete or not at all."""
    return (folder / "config.json").is_file()


def build_model(
    name: str, folder: Path, *, on_progress: Progress | None = None, **options: Any
) -> None:
    """Write the named model to `folder`, which appears only once it is complete.

    `options` are those of the model's builder, which tells `on_progress` (parts done, parts in
    all) where it takes long. ConfigError if `name` is not built here, an option makes no sense or
    `folder` cannot be written.
    """
    if name not in MODEL_NAMES:
        raise ConfigError(f"there is no model {name!r}: choose one of {', '.join(MODEL_NAMES)}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if name == SMOLLM2:
            build_smollm2_moe(folder, on_progress=on_progress, **options)
        else:
            _write_random(name, folder, **options)
    except ValueError as error:
        raise ConfigError(f"cannot build model {name}: {error}") from error
    except OSError as error:
        raise ConfigError(
            f"cannot write model {name} to {folder}: {error.strerror or error}: free some space, "
            "or set INTERLACE_CACHE to a folder that can be written"
        ) from error


def _write_random(name: str, folder: Path, seed: int = 0) -> None:
    tiny = name in TINY_MODELS
    architecture, sizes = (TINY_MODELS[name], {}) if tiny else ("qwen3_moe", BENCH_SIZES)
    building = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        write_random_model(building, architecture, seed, **sizes)
        building.chmod(0o755)
        try:
            building.rename(folder)
        except OSError:
            if not is_model(folder):
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
