"""FP8 -> BF16 and FP4 -> FP8 against SGLang's own functions: same inputs, same process, a fresh output each time."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_dsv4.cli.bench.measure import in_words, machine, medians, positive, upstream

if TYPE_CHECKING:
    import torch

TILE = 128  # upstream's FP4 cast takes nothing else
WO_A = (8192, 4096)  # wo_a of a Flash layer
EXPERT = (2048, 4096)  # w1 of a Flash expert


@dataclass(frozen=True)
class Case:
    """One conversion, by them and by us; both return the tensors that must be equal bit for bit."""

    name: str
    shape: tuple[int, int]
    bytes_moved: int
    theirs: Callable[[], tuple[torch.Tensor, ...]]
    ours: Callable[[int], tuple[torch.Tensor, ...]]


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register `bench dequant`."""
    parser = subparsers.add_parser("dequant", help="FP8 -> BF16 and FP4 -> FP8", description=__doc__)
    parser.add_argument("--size", type=_size, metavar="ROWSxCOLUMNS", help="of both weights (default: those of Flash)")
    parser.add_argument("--threads", type=positive, metavar="N", help="CPU threads of both (default: one, then all)")
    parser.add_argument("--repeat", type=positive, default=9, metavar="N", help="calls of each (default: 9)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print. Returns 1 if any bit differs."""
    import torch

    from sglang_dsv4.numerics.backend import cpu_threads, warm_up

    warm_up()
    used = torch.get_num_threads()
    results = []
    try:
        for case in _cases(args.size):
            for threads in [args.threads] if args.threads else sorted({1, cpu_threads()}):
                torch.set_num_threads(threads)
                results.append(_measure(case, threads, args.repeat))
    finally:
        torch.set_num_threads(used)
    _print({"machine": machine(), "repeat": args.repeat, "cases": results}, args.json)
    return 0 if all(result["bits_equal"] for result in results) else 1


def _size(text: str) -> tuple[int, int]:
    rows, _, columns = text.partition("x")
    size = positive(rows), positive(columns)
    if size[0] % TILE or size[1] % TILE:
        raise argparse.ArgumentTypeError(f"{text}: SGLang's functions want multiples of {TILE}")
    return size


def _cases(size: tuple[int, int] | None) -> Iterator[Case]:
    import torch

    generator = torch.Generator().manual_seed(0)

    def random(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)

    yield _wo_a(size or WO_A, random)
    yield _expert(size or EXPERT, random)


def _wo_a(shape: tuple[int, int], random: Callable[..., torch.Tensor]) -> Case:
    import torch

    from sglang_dsv4.numerics.fp8 import fp8_to_bf16

    theirs = upstream("sglang.srt.models.deepseek_v4", "_dequant_fp8")
    codes = random(0, 256, *shape)
    weight = codes.masked_fill_(codes & 0x7F == 0x7F, 0).view(torch.float8_e4m3fn)
    scale = random(100, 140, shape[0] // TILE, shape[1] // TILE).view(torch.float8_e8m0fnu)
    return Case(
        "wo_a FP8 -> BF16",
        shape,
        3 * weight.numel() + scale.numel(),
        lambda: (theirs(weight, scale),),
        lambda threads: (fp8_to_bf16(weight, scale, (TILE, TILE), name="wo_a", threads=threads),),
    )


def _expert(shape: tuple[int, int], random: Callable[..., torch.Tensor]) -> Case:
    import torch

    from sglang_dsv4.numerics.fp4 import fp4_to_fp8

    theirs = upstream("sglang.srt.layers.quantization.fp8", "cast_e2m1fn_to_e4m3fn")
    weight = random(0, 256, shape[0], shape[1] // 2).view(torch.int8)
    scale = random(110, 125, shape[0], shape[1] // 32).view(torch.float8_e8m0fnu)

    def ours(threads: int) -> tuple[torch.Tensor, torch.Tensor]:
        result = fp4_to_fp8(weight, scale, (TILE, TILE), name="w1", threads=threads)
        return result.weight, result.scale

    return Case("expert FP4 -> FP8", shape, 3 * weight.numel() + scale.numel(), lambda: theirs(weight, scale), ours)


def _measure(case: Case, threads: int, repeat: int) -> dict[str, Any]:
    import torch

    pairs = zip(case.theirs(), case.ours(threads), strict=True)
    equal = all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)
    theirs, ours = medians(case.theirs, lambda: case.ours(threads), repeat)
    elements = case.shape[0] * case.shape[1]
    speeds = {
        who: {
            "seconds": seconds,
            "elements_per_second": elements / seconds,
            "bytes_per_second": case.bytes_moved / seconds,
        }
        for who, seconds in (("upstream", theirs), ("ours", ours))
    }
    return {
        "name": case.name,
        "rows": case.shape[0],
        "columns": case.shape[1],
        "threads": threads,
        **speeds,
        "ratio": theirs / ours,
        "bits_equal": equal,
    }


def _print(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(report, indent=2))
        return
    print(in_words(report["machine"]))
    print(f"medians of {report['repeat']} calls, taken in turn; bytes are those read and written")
    for case in report["cases"]:
        print(f"{case['name']} {case['rows']}x{case['columns']}, {case['threads']} thread(s)")
        for who in ("upstream", "ours"):
            speed = case[who]
            print(
                f"  {who:<9}{speed['seconds'] * 1e3:10.2f} ms {speed['elements_per_second'] / 1e9:8.3f} G elements/s"
                f" {speed['bytes_per_second'] / 1e9:8.2f} GB/s"
            )
        print(f"  {case['ratio']:.1f} times upstream, bits {'equal' if case['bits_equal'] else 'DIFFER'}")
