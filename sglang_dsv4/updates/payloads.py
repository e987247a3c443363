"""What a call with tensors in it brings: a list of named tensors, whatever form they came in, each checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sglang_dsv4.checkpoint.names import counted
from sglang_dsv4.errors import UpdateError

FLATTENED = "flattened_bucket"
"""The load_format of tensors that lie in one buffer of bytes."""

_SEND_PLAINLY = "Send the checkpoint's names without load_format, or as a flattened_bucket."


def named_tensors(payload: Any, load_format: str | None, tp_rank: int) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a bucket for this rank, on whatever device they are. UpdateError for what is no bucket, and for a
    load_format that would write past load_weights."""
    if load_format == FLATTENED:
        return _unflattened(payload)
    if load_format is not None:
        raise UpdateError(
            f"load_format {load_format!r} is not taken by --model-impl sglang_dsv4",
            found="a format that writes parameters by itself: nothing would be judged, cut or converted"
            if load_format == "direct" or "." in load_format
            else "a word that SGLang does not know here",
            expected=f"no load_format, or {FLATTENED}",
            remedy=_SEND_PLAINLY,
        )
    if not isinstance(payload, Sequence):
        raise _no_bucket(payload)
    tensors = []
    for item in payload:
        if not isinstance(item, Sequence) or len(item) != 2 or not isinstance(item[0], str):
            raise _no_bucket(item)
        name, tensor = item
        if not isinstance(tensor, torch.Tensor):
            tensor = _own_part(name, tensor, tp_rank)
        tensors.append((name, _with_data(name, tensor)))
    return tensors


def require_payload_for_each_rank(payloads: Any, ranks: int) -> None:
    """UpdateError where a call brings fewer payloads than there are ranks."""
    if not isinstance(payloads, Sequence) or len(payloads) < ranks:
        found = counted(len(payloads), "payload") if isinstance(payloads, Sequence) else type(payloads).__name__
        raise UpdateError(
            "serialized_named_tensors does not bring a payload for each rank",
            found=found,
            expected=f"{ranks}, one for each rank of --tp-size",
            remedy="Serialise the list of (name, tensor) once for each rank.",
        )


def _own_part(name: str, given: Any, tp_rank: int) -> torch.Tensor:
    """What a LocalSerializedTensor holds for this rank."""
    values = getattr(given, "values", None)
    if not isinstance(values, Sequence) or len(values) <= tp_rank:
        raise _no_bucket(given, f"{name}: ")
    return given.get(tp_rank)


def _unflattened(payload: Any) -> list[tuple[str, torch.Tensor]]:
    """Views of a flattened bucket; a copy where a tensor does not lie as its dtype needs it.

    Metadata is the sender's word: each entry has to lie in the buffer, to be as long as its shape says, and to overlap
    no other.
    """
    flat = payload.get("flattened_tensor") if isinstance(payload, Mapping) else None
    metadata = payload.get("metadata") if isinstance(payload, Mapping) else None
    if not isinstance(flat, torch.Tensor) or not isinstance(metadata, Sequence):
        raise _no_bucket(payload)
    if flat.dtype != torch.uint8 or flat.dim() != 1:
        raise _bad_metadata("flattened_tensor", f"{flat.dtype}, {flat.dim()} dimensions", "uint8, one dimension")
    _with_data("flattened_tensor", flat)
    for meta in metadata:
        _require_fields(meta)
    end_before, before = 0, ""
    for meta in sorted(metadata, key=lambda meta: (meta.start_idx, meta.end_idx)):
        _require_place(meta, flat.numel())
        if meta.start_idx < end_before:
            raise _bad_metadata(meta.name, f"bytes from {meta.start_idx}", f"from {end_before}, where {before} ends")
        end_before, before = meta.end_idx, meta.name
    return [(meta.name, _part(flat, meta)) for meta in metadata]


def _with_data(name: str, tensor: Any) -> torch.Tensor:
    """The tensor, where it is one that can be copied."""
    if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided and not tensor.is_meta:
        return tensor
    kind = f"{tensor.layout} on {tensor.device}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
    raise UpdateError(
        f"{name}: there is no data to copy in what came", found=kind, expected="a dense tensor", remedy=_SEND_PLAINLY
    )


def _require_fields(meta: Any) -> None:
    kinds = {"name": str, "start_idx": int, "end_idx": int, "shape": Sequence, "dtype": torch.dtype}
    wrong = [field for field, kind in kinds.items() if not isinstance(getattr(meta, field, None), kind)]
    if wrong or not all(isinstance(extent, int) for extent in meta.shape):
        what = ", ".join(wrong) or "shape"
        raise _bad_metadata(str(getattr(meta, "name", "an entry")), f"no good {what}", "name, places, dtype and shape")


def _require_place(meta: Any, length: int) -> None:
    shape = tuple(meta.shape)
    if any(extent < 0 for extent in shape):
        raise _bad_metadata(meta.name, f"shape {list(shape)}", "a shape")
    size = torch.Size(shape).numel() * meta.dtype.itemsize
    if not 0 <= meta.start_idx <= meta.end_idx <= length or meta.end_idx - meta.start_idx != size:
        found = f"bytes {meta.start_idx} to {meta.end_idx} of {length}"
        raise _bad_metadata(meta.name, found, f"{counted(size, 'byte')} of {meta.dtype} {list(shape)}, in the buffer")


def _part(flat: torch.Tensor, meta: Any) -> torch.Tensor:
    part = flat[meta.start_idx : meta.end_idx]
    if part.data_ptr() % meta.dtype.itemsize or part.storage_offset() % meta.dtype.itemsize:
        part = part.clone()
    return part.view(meta.dtype).reshape(tuple(meta.shape))


def _bad_metadata(name: str, found: str, expected: str) -> UpdateError:
    return UpdateError(
        f"{name}: the metadata of this bucket is wrong",
        found=found,
        expected=expected,
        remedy="Make the bucket with SGLang's FlattenedTensorBucket.",
    )


def _no_bucket(found: Any, what: str = "") -> UpdateError:
    return UpdateError(
        f"{what}this call brings no bucket of tensors",
        found=type(found).__name__,
        expected="a list of (name, tensor), or a flattened_bucket with its tensor and metadata",
        remedy=_SEND_PLAINLY,
    )
