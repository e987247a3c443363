"""What is served is what the file says: every parameter bitwise, every logit of the whole vocabulary.

Reciting is no proof: an overtrained model recites through a wrong scale.
"""

import math
import random
from pathlib import Path

import numpy as np
import oracle
import pytest
import servers
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

LENGTH = 301  # past two sliding windows of 128, and two blocks of 128 for HCA; 75 blocks of 4 for CSA
STEPS = 4


@pytest.fixture(params=["on the text", "off the text"])
def prompt(request: pytest.FixtureRequest, tokenizer: Tokenizer, recited: str) -> list[int]:
    if request.param == "on the text":
        ids = tokenizer.encode(recited).ids
        return (ids * math.ceil(LENGTH / len(ids)))[:LENGTH]
    return random.Random(7).choices(range(2, 256), k=LENGTH)


def test_every_parameter_is_the_file_s(dumped, checkpoint: Path) -> None:
    loaded = load_file(dumped.parameters)
    expected = oracle.state(checkpoint)
    assert loaded.keys() == expected.keys()
    assert oracle.differences(expected, loaded) == []


def test_every_logit_is_the_oracle_s(dumped, reference: torch.nn.Module, prompt: list[int]) -> None:
    before = set(dumped.logits.glob("*"))
    answer = dumped.server.generate(prompt, STEPS, return_logprob=True)
    steps = [load_file(path) for path in sorted(set(dumped.logits.glob("*")) - before)]
    whole = prompt + answer["output_ids"]
    covered = 0
    for step in steps:
        ids, logits = step["ids"].tolist(), step["logits"]
        assert ids == whole[: len(ids)]
        assert torch.equal(logits, oracle.logits(reference, ids)[-len(logits) :])
        covered += len(logits)
    # every position of the prompt that was not cached, and each further step; the last token is never fed back
    assert covered + answer["meta_info"]["cached_tokens"] == len(whole) - 1


def test_served_logprobs_are_the_oracle_s(
    server: servers.Server, reference: torch.nn.Module, prompt: list[int]
) -> None:
    answer = server.generate(prompt, STEPS, return_logprob=True, top_logprobs_num=5)
    ids = list(prompt)
    for (logprob, token, _), top in zip(
        answer["meta_info"]["output_token_logprobs"], answer["meta_info"]["output_top_logprobs"], strict=True
    ):
        expected = oracle.logits(reference, ids)[-1].log_softmax(-1)
        assert token == int(expected.argmax())
        assert logprob == pytest.approx(float(expected[token]), abs=1e-5)
        assert [one[0] for one in top] == pytest.approx(expected.topk(5).values.tolist(), abs=1e-5)
        ids.append(token)
    assert np.isfinite(answer["meta_info"]["output_token_logprobs"][0][0])
