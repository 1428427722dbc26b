"""Which size the blocks of vLLM's cache get: the soonest of a few, tried once for a folder of runs.

The choice stands for all runs of that folder, or they would not be of one arm.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from interlace.rollout.ablation.arms import Arm
from interlace.rollout.ablation.bench import Run

from .contestants import BLOCK_SIZES, VLLM, VLLM_USUAL, family_of, with_block_size

Tried = Mapping[str, Mapping[str, Any]]
"""``default`` or a size -> its `completion_s`, or its `error`."""
_DEFAULT = "default"


def tried_sizes(
    folder: Path, run: Callable[[Arm], Run], tell: Callable[[str], None] = lambda line: None
) -> Tried:
    """What came of each size; `run` makes one run of an arm, unless `folder` knows already.

    Nothing is kept if all have failed.
    """
    path = folder / "vllm_block_sizes.json"
    if path.is_file():
        kept: Tried = json.loads(path.read_text(encoding="utf-8"))
        return kept
    tried = {}
    for size in BLOCK_SIZES:
        word = _DEFAULT if size is None else str(size)
        made = run(with_block_size(VLLM_USUAL, size, f"{VLLM_USUAL.name}-block-{word}"))
        tried[word] = (
            {"error": made.error}
            if made.figures is None
            else {"completion_s": made.figures["completion_s"]}
        )
        tell(f"vLLM with blocks of size {word}: {size_words(tried[word])}")
    if any("completion_s" in one for one in tried.values()):
        path.write_text(json.dumps(tried, indent=1) + "\n", encoding="utf-8")
    return tried


def with_soonest_size(arms: Sequence[Arm], tried: Tried) -> list[Arm]:
    """The arms, those of vLLM with the size of blocks that was soonest."""
    seconds = {word: one["completion_s"] for word, one in tried.items() if "completion_s" in one}
    word = min(seconds, key=lambda one: seconds[one], default=_DEFAULT)
    size = None if word == _DEFAULT else int(word)
    return [with_block_size(arm, size, arm.name) if family_of(arm) == VLLM else arm for arm in arms]


def size_words(one: Mapping[str, Any]) -> str:
    """What came of one size."""
    return f"failed: {one['error']}" if "error" in one else f"{one['completion_s']:.2f} s"
