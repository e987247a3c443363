"""A byte-level tokenizer in Hugging Face form: one token a byte, and the special tokens that a DeepSeek chat needs.

SGLang encodes a chat when it starts a DeepSeek-V4 and stops without them. Written as JSON, so nothing is imported.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
USER, ASSISTANT, THINK, THINK_END = "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"
HEAD_TOKENS = (BOS, EOS, PAD)
"""Ids 0, 1 and 2, as in the releases; the 256 bytes follow, then `CHAT_TOKENS`."""
CHAT_TOKENS = (USER, ASSISTANT, THINK, THINK_END)

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}" + USER + "{{ m.content }}"
    "{% elif m.role == 'assistant' %}" + ASSISTANT + THINK_END + "{{ m.content }}{{ eos_token }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}" + ASSISTANT + THINK_END + "{% endif %}"
)


def byte_symbols() -> list[str]:
    """The printable character that byte-level BPE writes for each of the 256 bytes.

    Printable Latin-1 stands for itself; the rest take the characters from U+0100 on, in order (GPT-2's table).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def byte_ids(text: str) -> list[int]:
    """The ids of a text without special tokens, begin and end of sentence not included."""
    return [len(HEAD_TOKENS) + byte for byte in text.encode()]


def write_tokenizer(folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json; encoding puts the begin-of-sentence token in front."""
    symbols = [*HEAD_TOKENS, *byte_symbols(), *CHAT_TOKENS]
    ids = {symbol: index for index, symbol in enumerate(symbols)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    bos = {"SpecialToken": {"id": BOS, "type_id": 0}}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(token, ids[token]) for token in (*HEAD_TOKENS, *CHAT_TOKENS)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [bos, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {BOS: {"id": BOS, "ids": [ids[BOS]], "tokens": [BOS]}},
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": ids,
            "merges": [],
        },
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1048576,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(folder / "tokenizer.json", tokenizer)
    write_json(folder / "tokenizer_config.json", settings)


def _added(token: str, index: int) -> dict[str, Any]:
    traits = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    # <think> is ordinary text to a reader of the output, as in the releases
    return {"id": index, "content": token, **traits, "special": token not in (THINK, THINK_END)}


def write_json(path: Path, value: Any) -> None:
    """UTF-8, indented, with a final newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
