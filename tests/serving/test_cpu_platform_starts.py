"""Other ways to start: the Python engine, upstream's own classes, converted experts, a draft."""

import json
import subprocess
import sys
from pathlib import Path

import oracle
import pytest
import servers
from safetensors.torch import load_file

from sglang_dsv4.checkpoint.tiny.make import Options, make_tiny

ENGINES = """
import json, os, sys
from sglang import Engine

if __name__ == "__main__":
    model, prompt, tokens, folder = sys.argv[1:]
    for impl in ("auto", "sglang_dsv4"):
        os.environ["DSV4_CPU_DUMP_PARAMETERS"] = f"{folder}/{impl}.safetensors"
        engine = Engine(model_path=model, model_impl=impl, log_level="error")
        answer = engine.generate(prompt, {"temperature": 0, "max_new_tokens": int(tokens)})
        engine.shutdown()
        print("ANSWER", json.dumps([impl, answer["text"]]), flush=True)
"""


@pytest.mark.in_turns(2)
def test_engine(server: servers.Server, checkpoint: Path, recited: str, tmp_path: Path) -> None:
    """The Python engine gives what the server gives, with upstream's classes and then with ours."""
    start, tokens = recited[:30], 40
    script = tmp_path / "engines.py"
    script.write_text(ENGINES)
    done = subprocess.run(
        [sys.executable, str(script), str(checkpoint), start, str(tokens), str(tmp_path)],
        env=servers.environment(),
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line.removeprefix("ANSWER ") for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    answers = dict(json.loads(line) for line in lines)
    served = server.generate(start, tokens)["text"]
    assert answers == {servers.UPSTREAM: served, servers.OURS: served}
    expected = oracle.state(checkpoint)
    for impl in answers:
        assert oracle.differences(expected, load_file(tmp_path / f"{impl}.safetensors")) == []


@pytest.mark.in_turns(2)
def test_a_draft_beside_converted_experts(checkpoint: Path, recited: str, tokenizer, tmp_path: Path) -> None:
    """NextN proposes, the target decides: the tokens are the target's own, whatever the draft says."""
    folder, parameters = tmp_path / "checkpoint", tmp_path / "parameters.safetensors"
    make_tiny(folder, Options(draft="mtp", source=checkpoint))
    speculative = "--speculative-algorithm EAGLE --speculative-num-steps 2 --speculative-eagle-topk 1"
    env = {"DSV4_CPU_DUMP_PARAMETERS": str(parameters), "SGLANG_DSV4_FP4_DEQUANT": "1"}
    arguments = [*speculative.split(), "--speculative-num-draft-tokens", "3"]
    prompt = tokenizer.encode(recited).ids[:160]
    with servers.serving(folder, *arguments, log=tmp_path / "log", env=env) as server:
        answer = server.generate(prompt, 6)
    assert oracle.differences(oracle.state(folder), load_file(parameters)) == []
    draft = load_file(parameters.with_suffix(".draft.safetensors"))
    assert oracle.differences(oracle.draft_state(folder), draft) == []
    reference, ids = oracle.model(folder), list(prompt)
    for token in answer["output_ids"]:
        assert token == int(oracle.logits(reference, ids)[-1].argmax())
        ids.append(token)
    assert answer["meta_info"]["spec_verify_ct"] > 0
