"""Whatever SGLang does with a request, it gets the tokens it would get alone."""

import random
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest
from servers import CHUNK, Server, generate_body

TOKENS = 6


def ids(seed: int, length: int) -> list[int]:
    """A prompt that no other test shares."""
    return random.Random(seed).choices(range(2, 256), k=length)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Shorter than a page, across a sliding window, and longer than two chunks."""
    return [ids(11, 5), ids(12, 40), ids(13, CHUNK - 1), ids(14, 2 * CHUNK + 70)]


@pytest.fixture(scope="module")
def alone(server: Server, prompts: list[list[int]]) -> list[list[int]]:
    """Each prompt's tokens when it is the only request and nothing of it is cached."""
    answers = [server.generate(prompt, TOKENS) for prompt in prompts]
    assert [answer["meta_info"]["cached_tokens"] for answer in answers] == [0] * len(prompts)
    return outputs(answers)


def outputs(answers: Iterable[dict]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


def test_several_requests_at_once(server: Server, prompts: list[list[int]], alone: list[list[int]]) -> None:
    twice = prompts + prompts
    with ThreadPoolExecutor(len(twice)) as pool:
        together = pool.map(lambda prompt: server.generate(prompt, TOKENS), twice)
    assert outputs(together) == alone + alone


def test_a_batch_in_one_request(server: Server, prompts: list[list[int]], alone: list[list[int]]) -> None:
    body = generate_body([], TOKENS) | {"input_ids": prompts}
    assert outputs(server.post("/generate", body)) == alone


def test_a_cached_prefix(server: Server, prompts: list[list[int]], alone: list[list[int]]) -> None:
    again = server.generate(prompts[-1], TOKENS)
    assert again["meta_info"]["cached_tokens"] == 2 * CHUNK
    assert again["output_ids"] == alone[-1]
    # another continuation of the same two pages: the same tokens as when nothing is cached
    other = prompts[-1][: 2 * CHUNK] + ids(15, 30)
    shared = server.generate(other, TOKENS)
    assert shared["meta_info"]["cached_tokens"] == 2 * CHUNK
    server.flush()
    fresh = server.generate(other, TOKENS)
    assert fresh["meta_info"]["cached_tokens"] == 0
    assert fresh["output_ids"] == shared["output_ids"]


def test_chunks_are_no_part_of_the_answer(server: Server, prompts: list[list[int]], alone: list[list[int]]) -> None:
    """The long prompt came in three chunks; its first tokens alone give what they give inside."""
    whole = server.generate(prompts[-1], 1, return_logprob=True, logprob_start_len=0)
    logprobs = [entry[0] for entry in whole["meta_info"]["input_token_logprobs"][1:CHUNK]]
    server.flush()
    first = server.generate(prompts[-1][:CHUNK], 1, return_logprob=True, logprob_start_len=0)
    assert logprobs == pytest.approx([entry[0] for entry in first["meta_info"]["input_token_logprobs"][1:]], abs=1e-4)


def test_streaming(server: Server, prompts: list[list[int]], alone: list[list[int]]) -> None:
    events = list(server.stream("/generate", generate_body(prompts[1], TOKENS)))
    assert len(events) > 1
    assert events[-1]["output_ids"] == alone[1]


def test_completions(server: Server, recited: str) -> None:
    """Text in, text out: it recites, in one piece and streamed, and as ``/generate`` does."""
    start, rest, few = recited[:40], recited[40:160], 30
    body = {"model": "default", "prompt": start, "max_tokens": len(rest), "temperature": 0}
    assert server.post("/v1/completions", body)["choices"][0]["text"] == rest
    events = server.stream("/v1/completions", body | {"max_tokens": few})
    assert "".join(event["choices"][0]["text"] for event in events) == rest[:few]
    assert server.generate(start, few)["text"] == rest[:few]


def test_seeded_sampling(server: Server, prompts: list[list[int]]) -> None:
    def sampled(seed: int) -> list[int]:
        parameters = {"temperature": 1.0, "max_new_tokens": 12, "ignore_eos": True, "sampling_seed": seed}
        return server.post("/generate", {"input_ids": prompts[1], "sampling_params": parameters})["output_ids"]

    with ThreadPoolExecutor(4) as pool:
        one, two, again, alike = pool.map(sampled, [1, 2, 1, 1])
    assert one == again == alike == sampled(1)
    assert one != two
