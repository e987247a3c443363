"""The FP4 truth table through SGLang's real argument resolution and ModelConfig, on real files.

Every cell of {SGLANG_DSV4_FP4_EXPERTS unset, 0, 1} x {SGLANG_DSV4_FP4_DEQUANT unset, 0, 1} x the layout on disk, once
for the target alone and once with its NextN draft. The expectation is three sentences of plain language, written again
here: a statement that the file contradicts is refused; a request to convert turns FP4 into FP8; NVFP4 cannot be
converted. What the table lets pass may still be refused for the device (a CPU runs no NVFP4).
"""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from warm_python import WarmPython

from sglang_dsv4.checkpoint.tiny.make import Options, make_tiny

FLAGS = (None, "0", "1")
LAYOUTS = ("fp4", "fp8", "nvfp4", "bf16")
EAGLE = ("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "1", "--speculative-eagle-topk", "1")

CELLS = """
import itertools, json, os
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.server_args import prepare_server_args
from sglang_dsv4.errors import Dsv4Error
names = ("SGLANG_DSV4_FP4_EXPERTS", "SGLANG_DSV4_FP4_DEQUANT")
def clear():
    for name in names:
        os.environ.pop(name, None)
for values in itertools.product((None, "0", "1"), repeat=2):
    clear()
    os.environ.update({{name: value for name, value in zip(names, values) if value is not None}})
    arguments = prepare_server_args({arguments})
    try:
        arguments.resolve_once()
    except Dsv4Error as error:
        print(json.dumps([values, "refused", str(error)]))
    else:
        fp4 = model_config_of(arguments).is_fp4_experts
        print(json.dumps([values, "fp4" if fp4 else "not fp4", {{name: os.environ.get(name) for name in names}}]))
"""


@pytest.fixture(scope="module")
def warm() -> Iterator[WarmPython]:
    driver = WarmPython()
    yield driver
    driver.close()


@pytest.fixture(scope="module")
def cells(warm: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """(layout, with draft) -> (EXPERTS, DEQUANT) -> [outcome, message or flags written for children]."""
    found = {}
    for layout in LAYOUTS:
        folder = tmp_path_factory.mktemp("truth") / layout
        make_tiny(folder, Options(expert_format=layout, draft="mtp"))
        for drafted in (False, True):
            found[layout, drafted] = resolve_all(warm, folder, drafted)
    return found


def resolve_all(warm: WarmPython, folder: Path, drafted: bool) -> dict:
    given = ["--model-path", str(folder), "--model-impl", "sglang_dsv4", *(EAGLE if drafted else ())]
    run = warm.run(CELLS.format(arguments=given))
    assert run.returncode == 0, run.stderr[-3000:]
    rows = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("[[")]
    return {tuple(values): rest for values, *rest in rows}


@pytest.mark.parametrize("drafted", [False, True], ids=["target", "with draft"])
@pytest.mark.parametrize(("experts", "dequant"), list(itertools.product(FLAGS, FLAGS)))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_cell_runs_or_is_refused_as_written(cells: dict, layout: str, experts: str, dequant: str, drafted: bool):
    outcome, rest = cells[layout, drafted][experts, dequant]
    four_bit = layout in ("fp4", "nvfp4")
    contradicted = experts is not None and (experts == "1") != four_bit
    if contradicted:
        assert outcome == "refused"
        assert f"SGLANG_DSV4_FP4_EXPERTS={experts} says" in rest
        assert "layers.0.ffn.experts.0.w1.weight" in rest  # the tensor that contradicts, by name
    elif layout == "nvfp4":
        assert outcome == "refused"
        reason = "SGLANG_DSV4_FP4_DEQUANT=1 asks for FP8" if dequant == "1" else "NVFP4"
        assert reason in rest
    else:
        converts = layout == "fp4" and dequant == "1"
        assert outcome == ("fp4" if layout == "fp4" and not converts else "not fp4")
        assert rest["SGLANG_DSV4_FP4_DEQUANT"] == str(int(converts))
        assert rest["SGLANG_DSV4_FP4_EXPERTS"] == str(int(four_bit))
