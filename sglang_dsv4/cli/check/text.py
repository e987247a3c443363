"""A report as a short table for people."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_dsv4.checkpoint.layout import DenseLayout, ExpertLayout
from sglang_dsv4.checkpoint.names import counted
from sglang_dsv4.checkpoint.sizes import Weights
from sglang_dsv4.cli.check.report import Report
from sglang_dsv4.decisions.launch import Files

Row = tuple[str, str]


def lines(report: Report) -> list[str]:
    """The table, the notes, each refusal as the server says it, then `OK` or how many refusals, and a launch line."""
    rows = [*_rows(report), *(("note", note) for note in report.notes)]
    for refused in report.refused:
        first, *rest = str(refused.error).splitlines()
        rows += [("refused", first), *(("", line) for line in rest)]
    width = max(len(label) for label, _ in rows)
    table = [f"{label:{width}}  {text}".rstrip() for label, text in rows]
    if report.ok:
        return [*table, "OK", *([report.launch] if report.launch else [])]
    count = counted(len(report.refused), "refusal")
    if report.launch is None:
        return [*table, count]
    return [*table, f"{count}; this works:", report.launch]


def _rows(report: Report) -> Iterator[Row]:
    files = report.files
    if files is None:
        yield "model", report.path
        return
    config = files.target.checkpoint.config
    size = f"{counted(config['NL'], 'layer')}, {counted(config['E'], 'expert')}"
    yield "model", f"{report.path}: {config.architecture}, {size}"
    layout = files.target.layout
    yield "layout", f"{files.target.view.dialect.name} names; {_half(layout.target, layout.target_dense)}"
    yield "draft", _draft(report)
    yield "files", _files(report, files)
    yield "stored", _stored(report)
    if report.ranks is not None:
        yield from _per_rank(report)
    yield "device", f"{report.device.arch} ({report.device.by})"
    yield from ((decided.what, f"{decided.value} ({decided.by})") for decided in report.decided)


def _half(experts: ExpertLayout, dense: DenseLayout) -> str:
    parts = []
    if experts.format is not None:
        scale = f" ({experts.scale_dtype} scales)" if experts.scale_dtype else ""
        parts.append(f"experts {experts.format.value}{scale}{', stacked' if experts.stacked else ''}")
    block = f" ({dense.block}x{dense.block} blocks, {dense.scale_dtype} scales)" if dense.block else ""
    formats = [f"{form.value}{block if form.value == 'FP8' else ''}" for form in dense.formats]
    return "; ".join([*parts, f"other linears {' and '.join(formats)}"])


def _draft(report: Report) -> str:
    drafted = report.drafted
    if drafted is None:
        return "none"
    layout = drafted.layout
    own = [name for name, there in (("embedding", layout.own_embedding), ("head", layout.own_head)) if there]
    loaded = report.inputs is not None and report.inputs.loads_draft
    parts = [
        f"{layout.draft_kind.value}, {counted(layout.stages, 'stage')}",
        _half(layout.draft, layout.draft_dense),
        f"own {' and '.join(own)}" if own else "",
        f"from {drafted.checkpoint.storage.uri}" if report.files and report.files.draft else "",
        "loaded" if loaded else "not loaded",
    ]
    return "; ".join(part for part in parts if part)


def _files(report: Report, files: Files) -> str:
    tensors, shards = files.target.view.tensors, report.shards()
    nbytes = sum(info.nbytes for info in tensors)
    needs = f"the target needs {shards['target']}" + (f", its draft {shards['draft']}" if shards["draft"] else "")
    return f"{len(tensors):,} tensors, {nbytes:,} bytes in {counted(shards['all'], 'shard')}; {needs}"


def _stored(report: Report) -> str:
    draft = f"; draft {_size(report.stored['draft'])}" if report.drafted is not None else ""
    return f"{_size(report.stored['target'])}{draft}"


def _per_rank(report: Report) -> Iterator[Row]:
    """Weights only, and it says so."""
    if report.ranks is None or report.inputs is None:
        return
    ranks, sizes = report.inputs.ranks.resolved(), report.ranks
    shape = f"TP {ranks.tp}, EP {ranks.ep}, PP {ranks.pp}"
    caveat = "weights only: no KV cache, no activations"
    if len(sizes.target) == 1:
        yield "per rank", f"{_size(sizes.target[0])} after conversion with {shape} ({caveat})"
    else:
        stages = "; ".join(_size(weights) for weights in sizes.target)
        yield "per rank", f"{stages} by pipeline stage, after conversion with {shape} ({caveat})"
    if sizes.draft is not None:
        yield "", f"and {_size(sizes.draft)} of the draft"


def _size(weights: Weights) -> str:
    count, unit = (weights.parameters / 1e9, "B") if weights.parameters >= 1e8 else (weights.parameters / 1e6, "M")
    size, name = (weights.nbytes / 1e9, "GB") if weights.nbytes >= 1e8 else (weights.nbytes / 1e6, "MB")
    return f"{count:,.2f} {unit} parameters, {size:,.2f} {name}"
