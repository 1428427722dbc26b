"""The ChatML conversation format, for tokenizers that are written here."""

from __future__ import annotations

IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"

CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Append-only: rendering more messages starts with the rendering of fewer."""


def tokenizer_config(*, template: str = CHATML_TEMPLATE, max_positions: int) -> dict[str, object]:
    """tokenizer_config.json of a byte-level tokenizer with the three special tokens above."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": IM_START,
        "eos_token": IM_END,
        "pad_token": IM_END,
        "unk_token": END_OF_TEXT,
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
