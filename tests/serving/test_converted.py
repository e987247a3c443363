"""An exact conversion changes nothing: with experts in FP8 and `wo_a` in BF16 the same values are served."""

from pathlib import Path

import oracle
import pytest
import servers
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

LENGTH = 301


@pytest.fixture(scope="module")
def converted(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory):
    """A server that converts experts and `wo_a` in the stream: its parameters and logits, and what it recited."""
    folder = tmp_path_factory.mktemp("converted")
    parameters, logits = folder / "parameters.safetensors", folder / "logits"
    flags = {
        "SGLANG_DSV4_FP4_DEQUANT": "1",
        "SGLANG_OPT_FP8_WO_A_GEMM": "0",
        "DSV4_CPU_DUMP_PARAMETERS": str(parameters),
        "DSV4_CPU_DUMP_LOGITS": str(logits),
    }
    with servers.serving(checkpoint, log=folder / "log", env=flags) as server:
        yield server, parameters, logits, folder / "log"


def test_the_log_says_what_was_decided_and_by_whom(converted):
    log = converted[3].read_text(errors="replace")
    assert "target experts packed FP4 -> block FP8 in the stream (SGLANG_DSV4_FP4_DEQUANT=1)" in log


def test_every_value_is_the_file_s(converted, checkpoint: Path):
    assert oracle.differences(oracle.state(checkpoint), load_file(converted[1])) == []


def test_every_logit_is_that_of_the_unconverted_file(converted, reference: torch.nn.Module, tokenizer: Tokenizer):
    server, _, logits, _ = converted
    ids = (tokenizer.encode("what cannot run is told before the cost").ids * 20)[:LENGTH]
    server.generate(ids, 1)
    (step,) = [load_file(path) for path in logits.glob("*") if len(load_file(path)["ids"]) == LENGTH]
    assert torch.equal(step["logits"], oracle.logits(reference, ids)[-len(step["logits"]) :])


def test_it_recites(converted, recited: str):
    rest = recited[30:150]
    answer = converted[0].generate(recited[:30], len(rest.encode()))
    assert answer["text"] == rest
