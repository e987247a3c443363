"""A report as JSON. Stable: keys are added, never renamed or removed."""

from __future__ import annotations

from typing import Any

from sglang_dsv4.checkpoint.layout import DenseLayout, ExpertLayout
from sglang_dsv4.cli.check.report import Refused, Report
from sglang_dsv4.decisions.launch import Files


def as_json(report: Report) -> dict[str, Any]:
    """`model`, `files`, `layout` and `weights` are null where the faults left nothing to tell."""
    files = report.files
    return {
        "ok": report.ok,
        "path": report.path,
        "device": report.device._asdict(),
        "model": None if files is None else _model(files),
        "files": None if files is None else _files(report, files),
        "layout": None if files is None else _layout(report, files),
        "weights": None if files is None else _weights(report),
        "decisions": [decided._asdict() for decided in report.decided],
        "environment": dict(report.environment),
        "notes": list(report.notes),
        "not_judged": list(report.not_judged),
        "refusals": [_refusal(refused) for refused in report.refused],
        "launch": report.launch,
    }


def _model(files: Files) -> dict[str, Any]:
    config = files.target.checkpoint.config
    return {
        "architecture": config.architecture,
        "family": config.family,
        "layers": config["NL"],
        "experts": config["E"],
        "names": files.target.view.dialect.name,
    }


def _files(report: Report, files: Files) -> dict[str, Any]:
    """`reads` counts opened files or range requests, `bytes_read` what they brought: config, index and headers."""
    checkpoint = files.target.checkpoint
    return {
        "tensors": len(files.target.view.tensors),
        "bytes": sum(info.nbytes for info in files.target.view.tensors),
        "shards": report.shards(),
        "ignored": list(checkpoint.ignored),
        "reads": checkpoint.storage.counters.reads,
        "bytes_read": checkpoint.storage.counters.bytes_read,
    }


def _layout(report: Report, files: Files) -> dict[str, Any]:
    layout, drafted = files.target.layout, report.drafted
    found: dict[str, Any] = {"target": _half(layout.target, layout.target_dense), "draft": None}
    if drafted is not None:
        layout = drafted.layout
        found["draft"] = _half(layout.draft, layout.draft_dense) | {
            "kind": layout.draft_kind.value,
            "stages": layout.stages,
            "own_embedding": layout.own_embedding,
            "own_head": layout.own_head,
            "from": drafted.checkpoint.storage.uri,
            "loaded": report.inputs is not None and report.inputs.loads_draft,
        }
    return found


def _half(experts: ExpertLayout, dense: DenseLayout) -> dict[str, Any]:
    return {
        "experts": None if experts.format is None else experts.format.value,
        "expert_scale": experts.scale_dtype,
        "evidence": [str(item) for item in experts.evidence],
        "dense": {form.value: count for form, count in dense.formats.items()},
        "dense_scale": dense.scale_dtype,
        "block": dense.block,
        "wo_a": sorted({form.value for form in dense.wo_a.values()}),
    }


def _weights(report: Report) -> dict[str, Any]:
    """`per_rank` is null for a launch that is refused."""
    ranks = report.ranks
    return {
        **{half: weights._asdict() for half, weights in report.stored.items()},
        "per_rank": None
        if ranks is None
        else {
            "target_by_pipeline_stage": [weights._asdict() for weights in ranks.target],
            "draft": None if ranks.draft is None else ranks.draft._asdict(),
        },
    }


def _refusal(refused: Refused) -> dict[str, Any]:
    error = refused.error
    return {
        "code": refused.code,
        "what": error.what,
        "found": error.found,
        "expected": error.expected,
        "remedy": error.remedy,
        "details": list(error.details),
        "message": str(error),
    }
