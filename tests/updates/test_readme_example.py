"""The README's example of a session runs as it is written, but for the model's place and the number of ranks."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import servers_updates as updates
from servers_updates import Serving, Two

ROOT = Path(__file__).parents[2]

SCRIPT = """
import json
import sys

from pathlib import Path

from servers_updates import PROMPT, TOKENS, buckets, tensors_of

example, folder = sys.argv[1:]
if __name__ == "__main__":
    names = {"buckets": buckets(tensors_of(Path(folder)), 20)}
    exec(example, names)
    sampling = {"temperature": 0, "max_new_tokens": TOKENS}
    answer = names["engine"].generate(input_ids=PROMPT, sampling_params=sampling)
    names["engine"].shutdown()
    print(json.dumps(answer["output_ids"]))
"""


def example() -> str:
    """The block of code in the README's section on updates."""
    section = (ROOT / "README.md").read_text().partition("## Weight updates\n")[2]
    lines = section.partition("Each call returns")[0].splitlines()
    return textwrap.dedent("\n".join(line for line in lines if line.startswith("    ") or not line))


@pytest.mark.thorough
def test_the_example_runs(two: Two, two_ranks: Serving, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    code = example()
    for written, meant in (("/models/DeepSeek-V4-Flash", str(two.first)), ("tp_size=8", "tp_size=1")):
        assert written in code
        code = code.replace(written, meant)
    env = os.environ | {"SGLANG_PLATFORM": "dsv4_cpu", "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, str(script), code, str(two.second)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=updates.PATIENCE, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1]) == two_ranks.alone[-updates.TOKENS :]
