"""`sglang-dsv4 bench dequant`: says what it measured, and fails when a bit differs."""

import argparse
import json

import pytest
import torch

from sglang_dsv4.cli.bench import add_parser, dequant, measure
from sglang_dsv4.errors import UnsupportedVersionError


def bench(*options: str) -> int:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    args = parser.parse_args(["bench", "dequant", "--size", "128x256", "--repeat", "2", *options])
    return args.run(args)


def test_report_as_json(capsys: pytest.CaptureFixture[str]):
    before = torch.get_num_threads()
    assert bench("--json", "--threads", "1") == 0
    assert torch.get_num_threads() == before
    report = json.loads(capsys.readouterr().out)
    assert {"processor", "cpus", "torch", "numba", "sglang"} <= report["machine"].keys()
    assert [case["name"] for case in report["cases"]] == ["wo_a FP8 -> BF16", "expert FP4 -> FP8"]
    for case in report["cases"]:
        assert (case["rows"], case["columns"], case["threads"]) == (128, 256, 1)
        assert case["bits_equal"] is True
        assert case["ratio"] == pytest.approx(case["upstream"]["seconds"] / case["ours"]["seconds"])
        assert case["ours"]["elements_per_second"] == pytest.approx(128 * 256 / case["ours"]["seconds"])


def test_report_in_words(capsys: pytest.CaptureFixture[str]):
    assert bench() == 0
    text = capsys.readouterr().out
    assert "times upstream, bits equal" in text
    assert "wo_a FP8 -> BF16 128x256, 1 thread(s)" in text


def test_a_bit_that_differs_is_a_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def off_by_one(module: str, name: str):
        function = measure.upstream(module, name)
        if name != "_dequant_fp8":
            return function
        return lambda *inputs: (function(*inputs).view(torch.int16) + 1).view(torch.bfloat16)

    monkeypatch.setattr(dequant, "upstream", off_by_one)
    assert bench("--threads", "1") == 1
    text = capsys.readouterr().out
    assert "bits DIFFER" in text
    assert "bits equal" in text


def test_function_that_a_release_lacks_is_named():
    with pytest.raises(UnsupportedVersionError, match="cannot compare with SGLang's no_such_function"):
        measure.upstream("sglang.srt.environ", "no_such_function")


@pytest.mark.parametrize(
    "options", [["--size", "100x128"], ["--size", "128"], ["--threads", "0"], ["--repeat", "many"]]
)
def test_wrong_usage_exits_with_two(options: list[str]):
    with pytest.raises(SystemExit) as caught:
        bench(*options)
    assert caught.value.code == 2


def test_calls_are_taken_in_turn():
    calls: list[str] = []
    measure.medians(lambda: calls.append("a"), lambda: calls.append("b"), 3)
    assert calls == ["a", "b"] * 3
