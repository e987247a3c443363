"""The reciting model recites from other dialects than its own, through the real server."""

import shutil
from pathlib import Path

import oracle
import pytest
import servers
import torch

from sglang_dsv4.checkpoint.tiny.make import Options, make_tiny

PROMPT, TOKENS = 24, 60  # bytes, and so tokens, of the text


def saved_by_transformers(source: Path, folder: Path) -> None:
    """What save_pretrained makes of the model in BF16: hybrid names, its own spelling of the config, no section."""
    oracle.model(source).to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(source / name, folder / name)


def of_quark(source: Path, folder: Path) -> None:
    make_tiny(folder, Options(names="quark", source=source))


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("write", [saved_by_transformers, of_quark])
def test_another_dialect_recites(checkpoint, recited, tmp_path, write):
    folder = tmp_path / "checkpoint"
    write(checkpoint, folder)
    with servers.serving(folder, log=tmp_path / "log") as server:
        answer = server.generate(recited[:PROMPT], TOKENS)["text"]
    assert answer == recited[PROMPT : PROMPT + TOKENS]
    log = (tmp_path / "log").read_text()
    said = (
        "config.json spells these otherwise" if write is saved_by_transformers else "SGLang is given quant_method fp8"
    )
    assert said in log
