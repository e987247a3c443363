"""Loading into a model that was loaded before: parameters that post-processing reshaped take their stored form again.

Where `wo_a` stays in FP8, SGLang replaces its block scale at the end of every load_weights by what its GEMM reads
(srt/models/deepseek_v4.py:5005 of 0.5.23, `_setup_fp8_wo_a_scales`): another shape, on Blackwell another dtype. A
second load would meet that. So the stored scales are kept, some kilobytes a layer, and put back first; this also holds
for an update that brings no `wo_a`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

STORED_SCALES = "_dsv4_stored_wo_a_scales"
"""Attribute of a loaded model: {parameter name: its data before post-processing}."""


@contextmanager
def stored_wo_a_scales(model: Any) -> Iterator[None]:
    """For the time of a load, let `wo_a` scales be as the checkpoint has them until post-processing takes them over.

    A load that fails before that leaves them as they were.
    """
    scales = {name: value for name, value in model.named_parameters() if name.endswith(".wo_a.weight_scale_inv")}
    before = {name: scale.data for name, scale in scales.items()}
    for name, stored in getattr(model, STORED_SCALES, {}).items():
        scales[name].data = stored.clone()

    def keep_and_postprocess(*args: Any, **kwargs: Any) -> Any:
        setattr(model, STORED_SCALES, {name: scale.detach().clone() for name, scale in scales.items()})
        before.clear()
        return type(model).post_load_weights(model, *args, **kwargs)

    model.post_load_weights = keep_and_postprocess
    try:
        yield
    finally:
        del model.post_load_weights
        for name, data in before.items():
            scales[name].data = data
