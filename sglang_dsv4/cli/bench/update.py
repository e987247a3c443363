"""A refit of a loaded model in buckets beside upstream's own classes, and what a bucket costs before it is written.

Timed is what SGLang does with tensors that have come: load_weights for each bucket, and the end of the session with its
post-processing. Both get the same buckets; what upstream fuses comes in one of them. Our own work is measured on a
model with all the names of Flash and narrow tensors: the plan, the judging of names, dtypes, shapes and scales, and
which halves are still to come.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_dsv4 import compat, envs
from sglang_dsv4.checkpoint.expert_names import expert_name
from sglang_dsv4.cli.bench.load import flags_kept
from sglang_dsv4.cli.bench.measure import in_words, machine, positive

if TYPE_CHECKING:
    from sglang_dsv4.stream import Named

NARROW = ("hidden_size", "num_attention_heads", "q_lora_rank", "o_groups", "o_lora_rank", "index_n_heads", "vocab_size")
"""Widths of Flash that the model with all its names takes from the tiny shape."""

OURS, UPSTREAM = "ours", "upstream"


class Stored(NamedTuple):
    """A tensor of a checkpoint: its shard, name, bytes."""

    shard: Path
    name: str
    nbytes: int


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register `bench update`."""
    parser = subparsers.add_parser("update", help="a refit of a loaded model in buckets", description=__doc__)
    parser.add_argument(
        "model", help="a local native checkpoint, such as `make-tiny OUT --shape flash --layers 2 --num-experts 64`"
    )
    parser.add_argument("--buckets", type=positive, default=64, metavar="N", help="calls of a refit (default: 64)")
    parser.add_argument("--repeat", type=positive, default=3, metavar="N", help="refits of each kind (default: 3)")
    parser.add_argument("--skip-upstream", action="store_true", help="measure ours alone")
    parser.add_argument("--skip-names", action="store_true", help="do not measure our own work on Flash's names")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print; SGLANG_DSV4_FP4_DEQUANT and SGLANG_OPT_FP8_WO_A_GEMM are taken from the environment.

    Upstream cannot take experts that it converts, nor a `wo_a` that stays FP8; what it says then is printed.
    """
    from sglang_dsv4.cli.load import require_device
    from sglang_dsv4.numerics.backend import warm_up

    require_device()
    warm_up()
    buckets = in_buckets(stored(Path(args.model)), args.buckets)
    found: dict[str, list[float] | str] = {OURS: refits(args, compat.MODEL_IMPL, buckets)}
    if not args.skip_upstream:
        try:
            found[UPSTREAM] = refits(args, "auto", buckets)
        except Exception as error:
            found[UPSTREAM] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    own = None if args.skip_names else own_work(args.buckets)
    _print(args, buckets, found, own)
    return 0


# --- a refit ----------------------------------------------------------------------------------------------------------


def stored(model: Path) -> list[Stored]:
    """The tensors of a checkpoint, in the order of its files."""
    from safetensors import safe_open

    from sglang_dsv4.checkpoint.index import Checkpoint

    sizes = {name: info.nbytes for name, info in Checkpoint.open(model).tensors.items()}
    tensors = []
    for shard in sorted(model.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as file:
            tensors += [Stored(shard, name, sizes[name]) for name in file.keys() if name in sizes]  # noqa: SIM118
    return tensors


def in_buckets(tensors: Sequence[Stored], count: int) -> list[list[Stored]]:
    """About `count` buckets of about equal bytes. An expert's projection, and the attention of a layer, stay together,
    since upstream wants what it fuses in one call."""
    groups = [list(group) for _, group in groupby(sorted(tensors, key=_together), _together)]
    total, done = sum(tensor.nbytes for tensor in tensors), 0
    buckets: list[list[Stored]] = [[]]
    for group in groups:
        if buckets[-1] and done * count >= total * len(buckets):
            buckets.append([])
        buckets[-1] += group
        done += sum(tensor.nbytes for tensor in group)
    return buckets


def _together(tensor: Stored) -> tuple[str, str]:
    expert = expert_name(tensor.name)
    if expert is not None:
        return tensor.shard.name, expert.module
    layer, attention, _ = tensor.name.partition(".attn.")
    return tensor.shard.name, f"{layer}{attention}" if attention else tensor.name.rpartition(".")[0] or tensor.name


def refits(args: argparse.Namespace, model_impl: str, buckets: list[list[Stored]]) -> list[float]:
    """Load with one implementation, then refit again and again: the seconds of each."""
    from sglang_dsv4.models.loading.rank import load_model, parallel_context, server_arguments

    arguments = server_arguments(args.model, model_impl=model_impl, log_level="error")
    with flags_kept(), parallel_context(arguments) as server_args:
        model = load_model(server_args)
        seconds = [refit(model, buckets) for _ in range(args.repeat)]
    del model
    gc.collect()
    return seconds


def refit(model: Any, buckets: Iterable[list[Stored]]) -> float:
    """One session; its seconds. What a bucket brings is read before, and copied out of the page cache."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    device = next(model.parameters()).device
    state = getattr(model, "loader_state", None)
    steps: list[float] = []

    def timed(call: Callable[..., Any], *arguments: Any) -> None:
        begin = time.perf_counter()
        call(*arguments)
        steps.append(time.perf_counter() - begin)

    if state is not None:
        timed(state.begin)
    for bucket in buckets:
        timed(model.load_weights, list(_read(bucket, str(device))))
    timed(DefaultModelLoader.postprocess_weights, model, device)
    if state is not None:
        timed(state.end)
    return sum(steps)


def _read(bucket: list[Stored], device: str) -> Iterator[Named]:
    from safetensors import safe_open

    for shard, tensors in groupby(bucket, lambda tensor: tensor.shard):
        with safe_open(shard, framework="pt", device="cpu") as file:
            for tensor in tensors:
                value = file.get_tensor(tensor.name)
                yield tensor.name, value.clone() if device == "cpu" else value.to(device)


# --- our own work -----------------------------------------------------------------------------------------------------


def own_work(count: int) -> dict[str, Any]:
    """Milliseconds for each of `count` buckets of a model with Flash's names, up to the writes."""
    from safetensors import safe_open

    from sglang_dsv4.checkpoint.tiny.config import TINY, native_config
    from sglang_dsv4.checkpoint.tiny.make import Options, write_model
    from sglang_dsv4.checkpoint.tiny.sources import Drawn
    from sglang_dsv4.models.loading.rank import load_model, parallel_context, server_arguments

    config = native_config("flash", "mtp") | {key: TINY[key] for key in NARROW} | {"moe_intermediate_size": 128}
    config |= {key: TINY[key] for key in ("rope_scaling", "max_position_embeddings", "index_topk")}
    with tempfile.TemporaryDirectory(prefix="sglang-dsv4-") as folder:
        model = Path(folder)
        write_model(model, Options(draft="mtp", sparse=True), config, Drawn(0, config["n_routed_experts"]))
        arguments = server_arguments(str(model), load_format="dummy", log_level="error")
        with flags_kept(), parallel_context(arguments) as server_args:
            state: Any = load_model(server_args).loader_state
            tensors: list[Named] = []
            for shard in sorted(model.glob("*.safetensors")):
                with safe_open(shard, framework="pt") as file:
                    tensors += [(name, file.get_tensor(name).clone()) for name in file.keys()]  # noqa: SIM118
            state.begin()
            cuts = [len(tensors) * number // count for number in range(count + 1)]
            spent = [_before_the_writes(state, tensors[start:stop]) for start, stop in pairwise(cuts)]
    return {
        "names": len(tensors),
        "buckets": count,
        "median_ms": round(statistics.median(spent) * 1e3, 2),
        "worst_ms": round(max(spent) * 1e3, 2),
    }


def _before_the_writes(state: Any, bucket: list[Named]) -> float:
    """Seconds of the processor that a bucket takes before the first of its tensors is written."""
    from sglang_dsv4.models.loading.session import entries_of
    from sglang_dsv4.models.loading.writer import writing
    from sglang_dsv4.stream.select import select

    begin = time.process_time()
    plan, report, session = state.plan(), state.new_report(), state.session
    session.require_fitting(entries_of(bucket), bucket, plan)
    for _ in select(session.fitting(bucket, plan, report, []), plan.share, report.skipped):
        pass
    with writing(state, plan):
        pass
    return time.process_time() - begin


# --- what is printed --------------------------------------------------------------------------------------------------


def _print(
    args: argparse.Namespace,
    buckets: list[list[Stored]],
    found: dict[str, list[float] | str],
    own: dict[str, Any] | None,
) -> None:
    flags = {flag.name: flag.raw() for flag in (envs.FP4_DEQUANT, envs.FP8_WO_A)}
    rows = {name: _row(runs) for name, runs in found.items()}
    ratio = None
    if "seconds" in rows.get(UPSTREAM, {}):
        ratio = round(rows[OURS]["seconds"] / rows[UPSTREAM]["seconds"], 3)
    nbytes = sum(tensor.nbytes for bucket in buckets for tensor in bucket)
    if args.json:
        ratios = {} if ratio is None else {f"{OURS}/{UPSTREAM}": ratio}
        report = {"machine": machine(), "flags": flags, "gigabytes": round(nbytes / 1e9, 3), "buckets": len(buckets)}
        print(json.dumps(report | {"variants": rows, "ratios": ratios, "own_work": own}, indent=1))
        return
    print(in_words(machine()))
    given = " ".join(f"{name}={value}" for name, value in flags.items() if value is not None)
    print(f"refit of {args.model}, {nbytes / 1e9:.2f} GB in {len(buckets)} buckets, median of {args.repeat}; {given}")
    for name, row in rows.items():
        print(f"  {name:9} {row['seconds']:8.3f} s" if "seconds" in row else f"  {name:9} cannot: {row['error']}")
    if ratio is not None:
        print(f"  {OURS}/{UPSTREAM} {ratio}")
    if own is not None:
        print(
            f"our own work before the writes, {own['names']:,} names in {own['buckets']} buckets: "
            f"{own['median_ms']} ms of the processor a bucket, at most {own['worst_ms']} ms"
        )


def _row(runs: list[float] | str) -> dict[str, Any]:
    if isinstance(runs, str):
        return {"error": runs}
    return {"seconds": round(statistics.median(runs), 3), "runs": [round(seconds, 3) for seconds in runs]}
