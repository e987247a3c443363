"""What a failed call tore stays torn until it is whole again, and payloads that hold nothing are refused."""

from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import servers_manager as managers
import servers_updates as updates
from jobs import FUSED, Load, tensors_of
from processes import process
from servers_updates import Two

WQ, WO, EXPERT = "layers.1.attn.wq_b", "layers.1.attn.wo_b", "layers.0.ffn.experts.0.w1"
DEQUANT = {"SGLANG_DSV4_FP4_DEQUANT": "1"}


@pytest.fixture(scope="module")
def inside():
    """A process where `wo_a` becomes BF16."""
    with process() as running:
        yield running


@contextmanager
def failing_once():
    """The first write of a call is made, and then fails."""
    from sglang_dsv4.models.loading.writer import Writer

    put, done = Writer._put, []

    def failing(self, place, parameter, tensor):
        put(self, place, parameter, tensor)
        done.append(place)
        if len(done) == 1:
            raise RuntimeError("planted")

    with patch.object(Writer, "_put", failing):
        yield


def pair(values, module):
    return [(f"{module}.{leaf}", values[f"{module}.{leaf}"]) for leaf in ("weight", "scale")]


def steps(load: Load, other: str, taken, flags=None):
    """Run `taken(managed, new values, old values)`; what it returns, and whether the scheduler serves."""
    with managers.managed(load, draft=True) as managed:
        found = taken(managed, dict(tensors_of(other, ())), dict(tensors_of(load.model, ())))
        return found, managed.manager.scheduler.dsv4_torn.text == ""


def torn(managed) -> bool:
    return bool(managed.manager.scheduler.dsv4_torn.text)


def folder_of_one_pair(managed, new, old):
    """A half, then a failure elsewhere, then a folder that heals only that; then all that lacks."""
    managed.call("begin_weight_update")
    answers = [managed.send([(f"{WQ}.scale", new[f"{WQ}.scale"])])]
    with failing_once():
        answers.append(managed.send(pair(new, WO)))
    missing = managed.call("update_weights_from_disk", model_path=str(Path(new["folder"]) / "none"))
    session = managed.manager._session is not None
    answers.append(managed.call("update_weights_from_disk", model_path=new["folder"]))
    between = torn(managed)
    managed.call("begin_weight_update")
    answers.append(managed.send(pair(new, WQ)))
    answers.append(managed.call("end_weight_update"))
    return answers, missing, session, between


def one_pair(two: Two, folder: Path) -> str:
    kept = lambda name, tensor: tensor if name.startswith(f"{WO}.") else None  # noqa: E731
    updates.changed(two.second, folder, change=kept)
    (folder / "model.safetensors.index.json").unlink()  # it names the shards' other tensors
    return str(folder)


def with_folder(load: Load, other: str, folder: str):
    return steps(load, other, lambda managed, new, old: folder_of_one_pair(managed, {**new, "folder": folder}, old))


def test_a_folder_that_heals_a_part_leaves_the_rest_torn_and_a_bad_path_costs_no_session(inside, two: Two, tmp_path):
    folder = one_pair(two, tmp_path / "part")
    (answers, missing, session, between), serves = inside.run(
        with_folder, Load(str(two.first)), str(two.second), folder
    )
    assert [success for success, _ in answers] == [True, False, True, True, True], "\n".join(map(str, answers))
    assert not missing[0]
    assert "Nothing of this call was written. The weights of this server are torn" in missing[1]
    assert session
    assert between
    assert f"{WQ}.weight" in answers[2][1]
    assert serves


def unrelated_bucket(managed, new, old):
    managed.call("begin_weight_update")
    managed.send(list(new.items()))
    with failing_once():
        managed.send(pair(old, WO))
    answers = [managed.send([("norm.weight", new["norm.weight"])])]
    between = torn(managed)
    answers += [managed.send(pair(new, WO)), managed.call("end_weight_update")]
    return answers, between


def half_again(managed, new, old):
    """The failed call's own half comes again, and not the one that waited for it."""
    managed.call("begin_weight_update")
    managed.send([(f"{EXPERT}.weight", new[f"{EXPERT}.weight"])])
    with failing_once():
        managed.send([(f"{EXPERT}.scale", new[f"{EXPERT}.scale"])])
    answers = [managed.send([(f"{EXPERT}.scale", new[f"{EXPERT}.scale"])])]
    between = torn(managed)
    answers += [
        managed.send([(f"{EXPERT}.weight", new[f"{EXPERT}.weight"])]),
        managed.call("end_weight_update"),
    ]
    return answers, between


@pytest.mark.parametrize("taken", [unrelated_bucket, half_again])
def test_a_server_is_torn_until_what_a_call_broke_has_come_whole(inside, two: Two, taken):
    load = Load(str(two.first), flags=DEQUANT)
    (answers, between), serves = inside.run(steps, load, str(two.second), taken)
    assert all(success for success, _ in answers), answers
    assert between
    assert serves


def numbers_too_large(managed, new, old):
    managed.call("begin_weight_update")
    name = "layers.0.ffn.gate.tid2eid"
    spoilt = new[name].clone()
    spoilt[0, 0] = 2**40
    before = managed.digests()
    return managed.send([(name, spoilt)]), before == managed.digests()


def test_what_its_parameter_cannot_hold_is_not_said_to_be_written(inside, two: Two):
    (answer, same), serves = inside.run(steps, Load(str(two.first)), str(two.second), numbers_too_large)
    assert not answer[0]
    assert "nothing was written" in answer[1]
    assert same
    assert serves


def short_scales(load: Load, other: str, module: str, dtype: str):
    """The same values in another dtype of scales; the digests after each."""
    import torch

    with managers.managed(load) as managed:
        new = dict(tensors_of(other, ()))
        (weight, codes), (name, scale) = pair(new, module)
        scale = scale.float().clamp(2.0**-14, 1.0)  # F16 holds these
        managed.call("begin_weight_update")
        answers, digests = [], []
        for kind in ("float32", dtype):
            answers.append(managed.send([(weight, codes), (name, scale.to(getattr(torch, kind)))]))
            digests.append(managed.digests())
        return answers, digests


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("module", "arguments"), [("layers.1.attn.wo_a", ()), ("layers.1.ffn.shared_experts.w1", FUSED)]
)
def test_scales_in_short_floats_are_taken_as_their_values(inside, two: Two, module, arguments, dtype):
    answers, digests = inside.run(
        short_scales, Load(str(two.first), arguments=arguments), str(two.second), module, dtype
    )
    assert all(success for success, _ in answers), answers
    assert digests[0] == digests[1]


def hollow(managed, new, old):
    """Payloads without data, or with metadata that is none; the answers."""
    import torch

    flat = torch.zeros(8, dtype=torch.uint8)
    good = {"name": "x", "start_idx": 0, "end_idx": 1, "shape": (1,), "dtype": torch.uint8}
    bad = [{"start_idx": None}, {"name": 4}, {"shape": None}, {"shape": ("a",)}, {"dtype": "uint8"}]
    buckets = [[SimpleNamespace(**good | change)] for change in bad] + [[{"name": "x"}]]
    managed.call("begin_weight_update")
    answers = [
        managed.send({"flattened_tensor": flat, "metadata": metadata}, load_format="flattened_bucket")
        for metadata in buckets
    ]
    name = f"{WQ}.weight"
    for tensor in (new[name].to("meta"), new["norm.weight"].to_sparse(), None):
        answers.append(managed.send([(name, tensor)]))
    return answers


def test_payloads_without_data_are_refused_in_plain_words(inside, two: Two):
    answers, serves = inside.run(steps, Load(str(two.first)), str(two.second), hollow)
    assert not [answer for answer in answers if answer[0]]
    for _, message in answers:
        assert "Error" not in message, message
        assert "expected" in message
    assert serves
