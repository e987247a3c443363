"""What a bucket may look like, and what its metadata may claim."""

import pytest
import servers_updates  # noqa: F401  (before SGLang is imported: it shares tensors by file)
import torch

from sglang_dsv4.errors import UpdateError
from sglang_dsv4.updates.payloads import FLATTENED, named_tensors, require_payload_for_each_rank

NAMED = [("a", torch.arange(3, dtype=torch.uint8)), ("b", torch.tensor([1.5, 2.5])), ("c", torch.ones(2, 2).bfloat16())]


def flattened():
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    bucket = FlattenedTensorBucket(named_tensors=NAMED)
    return {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}


def test_a_flattened_bucket_gives_its_tensors_back_though_they_do_not_lie_as_their_dtypes_need_it():
    found = named_tensors(flattened(), FLATTENED, 0)
    assert [name for name, _ in found] == ["a", "b", "c"]
    assert all(torch.equal(mine, theirs) for (_, mine), (_, theirs) in zip(found, NAMED, strict=True))


def shifted(entry, **changes):
    payload = flattened()
    for name, value in changes.items():
        setattr(payload["metadata"][entry], name, value)
    return payload


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        (shifted(2, start_idx=11, end_idx=99), "c: the metadata"),
        (shifted(0, start_idx=-3, end_idx=0), "a: the metadata"),
        (shifted(1, start_idx=1, end_idx=9), "bytes from 1; expected from 3, where a ends"),
        (shifted(1, shape=torch.Size([3])), "expected 12 bytes of torch.float32"),
        (shifted(1, dtype="float32"), "b: the metadata of this bucket is wrong; found no good dtype"),
        ({"flattened_tensor": torch.ones(4), "metadata": []}, "flattened_tensor: the metadata"),
        ({"metadata": []}, "brings no bucket"),
        (None, "brings no bucket"),
        (NAMED, "brings no bucket"),
    ],
)
def test_metadata_that_does_not_fit_its_buffer_is_refused(payload, said):
    with pytest.raises(UpdateError, match="") as raised:
        named_tensors(payload, FLATTENED, 0)
    assert said in str(raised.value)


def test_the_first_tensor_may_overlap_none_wherever_the_list_has_it():
    payload = shifted(1, start_idx=1, end_idx=9)
    payload["metadata"].reverse()
    with pytest.raises(UpdateError, match="where a ends"):
        named_tensors(payload, FLATTENED, 0)


@pytest.mark.parametrize("load_format", ["direct", "my.loader", "zip"])
def test_a_format_that_writes_past_load_weights_is_refused_by_name(load_format):
    with pytest.raises(UpdateError, match=f"load_format '{load_format}' is not taken"):
        named_tensors(NAMED, load_format, 0)


@pytest.mark.parametrize("payload", [[("a",)], [(1, torch.ones(1))], 7, [("a", "no tensor")]])
def test_what_is_no_bucket_is_refused(payload):
    with pytest.raises(UpdateError, match="brings no bucket of tensors"):
        named_tensors(payload, None, 0)


def test_each_rank_takes_its_own_part():
    from sglang.srt.model_executor.model_runner_components.weight_updater import LocalSerializedTensor
    from sglang.srt.utils import MultiprocessingSerializer

    given = LocalSerializedTensor([MultiprocessingSerializer.serialize(torch.full((2,), rank)) for rank in range(2)])
    ((_, tensor),) = named_tensors([("a", given)], None, 1)
    assert tensor.tolist() == [1, 1]
    with pytest.raises(UpdateError, match="a: this call brings no bucket"):
        named_tensors([("a", given)], None, 2)


@pytest.mark.parametrize(("payloads", "found"), [([], "0 payloads"), (["x"], "1 payload"), ("x", "1 payload")])
def test_there_is_a_payload_for_each_rank(payloads, found):
    with pytest.raises(UpdateError, match=f"found {found}; expected 2"):
        require_payload_for_each_rank(payloads, 2)
    require_payload_for_each_rank(["x", "y"], 2)
