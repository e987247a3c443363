"""Roads that no CPU server has, and launches that no CPU has: SGLang's manager over loaded models in a process."""

import re

import pytest
import servers_manager as managers
import servers_updates as updates
from jobs import Load, tensors_of
from processes import process
from servers_updates import Two

DEQUANT = {"SGLANG_DSV4_FP4_DEQUANT": "1"}


@pytest.fixture(scope="module")
def inside():
    """A process that keeps `wo_a` in FP8."""
    with process(wo_a_fp8="1") as running:
        yield running


def job(folder, **how) -> Load:
    return Load(str(folder), **how)


# --- addresses --------------------------------------------------------------------------------------------------------


def refitted(load: Load, other: str, dequant: bool):
    """A session and a disk load of another checkpoint: what each served at its end, and what moved."""
    from sglang_dsv4.updates.launches import addresses, moved

    with managers.managed(load, draft=True) as managed:
        before = {role: addresses(model) for role, model in managed.models.items()}
        first = managed.digests()
        answers = [managed.call("update_weights_from_disk", model_path=other)]
        from_disk = managed.digests()
        answers.append(managed.call("begin_weight_update"))
        answers += [managed.send(bucket) for bucket in updates.buckets(dict(tensors_of(load.model, ())), 7)]
        answers.append(managed.call("end_weight_update"))
        elsewhere = {role: moved(before[role], model) for role, model in managed.models.items()}
        return answers, first, from_disk, managed.digests(), elsewhere


def alone(load: Load):
    with managers.managed(load, draft=True) as managed:
        return managed.digests()


@pytest.mark.parametrize("flags", [{}, DEQUANT], ids=["fp4", "dequant"])
def test_disk_and_session_give_the_values_of_a_fresh_load_in_the_memory_that_is_there(inside, two: Two, flags):
    load = job(two.first, flags=flags)
    answers, first, from_disk, last, elsewhere = inside.run(refitted, load, str(two.second), bool(flags))
    assert all(success for success, _ in answers), answers
    assert from_disk == inside.run(alone, job(two.second, flags=flags))
    assert last == first != from_disk
    assert elsewhere == {"target": [], "draft": []}


# --- disk -------------------------------------------------------------------------------------------------------------


def failing_folder(load: Load, bad: str, good: str):
    """A folder that fails in the middle, then a whole one: answers, paths, and what reading the first came to."""
    from sglang_dsv4.updates.disk import AgainError, Folder

    reads = []
    stream = Folder.stream

    def counted(folder, runner):
        try:
            tensors = stream(folder, runner)
        except AgainError:
            reads.append("refused")
            raise
        reads.append(runner.role)
        return tensors

    with managers.managed(load, draft=True) as managed:
        Folder.stream = counted
        try:
            failed = managed.call("update_weights_from_disk", model_path=bad)
        finally:
            Folder.stream = stream
        configs = [runner.weight_updater.model_config.model_path for _, runner in managed.manager._select_runners()]
        scheduler = managed.manager.scheduler
        torn = scheduler.dsv4_torn.text, "process_input_requests" in scheduler.__dict__, scheduler.aborted
        healed = managed.call("update_weights_from_disk", model_path=good)
        whole = scheduler.dsv4_torn.text, "process_input_requests" in scheduler.__dict__
        return failed, configs, reads, torn, healed, whole


def test_a_folder_that_fails_in_the_middle_is_not_read_again_and_tears_until_a_whole_one_comes(
    inside, two: Two, tmp_path
):
    """SGLang's rollback would read it once more, and claim the old weights."""

    def inexact(name, tensor):
        if name != "layers.1.ffn.experts.0.w1.scale":
            return tensor
        raw = tensor.view(dtype=managers.dtype_of_bytes()).clone()
        raw[0, 0], raw[0, 1] = 100, 140
        return raw.view(tensor.dtype)

    bad = updates.changed(two.second, tmp_path / "bad", change=inexact)
    load = job(two.first, flags=DEQUANT)
    failed, paths, reads, torn, healed, whole = inside.run(failing_folder, load, str(bad), str(two.second))
    assert not failed[0]
    assert "layers.1.ffn.experts.0.w1" in failed[1]
    assert "written: model." in failed[1]
    assert "Rolling back" not in failed[1]
    assert paths == [str(two.first)] * 2
    assert reads == ["target", "refused"]
    assert torn[0].startswith("target: ")
    assert torn[1:] == (True, True)
    assert healed[0], healed
    assert whole == ("", False)


# --- checkpoint engine ------------------------------------------------------------------------------------------------


def transferred(load: Load, other: str, spoil: str, ends: bool = True, in_session: bool = False):
    """What a fake engine's transfer of a checkpoint does: the answer, connections, buckets taken, digests."""
    with managers.managed(load, draft=True) as managed:
        named = [(name, tensor[:1] if name == spoil else tensor) for name, tensor in tensors_of(other, ())]
        engine = managers.FakeEngine([named[start::6] for start in range(6)], ends=ends)
        if in_session:
            assert managed.call("begin_weight_update")[0]
        before = managed.digests()
        with engine.installed():
            answer = managed.call("update_weights_from_ipc", zmq_handles={"GPU-fake": "ipc:///fake"})
        after = managed.digests()
        closed = all(model.loader_state.session is None for model in managed.models.values())
        return answer, engine.connections, engine.taken, before, after, closed


def test_one_connection_feeds_every_model(inside, two: Two):
    answer, connections, taken, _, after, closed = inside.run(transferred, job(two.first), str(two.second), "")
    assert answer[0], answer
    assert (connections, taken, closed) == (1, 6, True)
    assert after == inside.run(alone, job(two.second))


@pytest.mark.parametrize("ends", [True, False], ids=["bad bucket", "no end"])
def test_a_transfer_that_fails_is_taken_to_its_end_and_answered(inside, two: Two, ends):
    spoil = "norm.weight" if ends else ""
    answer, connections, taken, before, after, closed = inside.run(
        transferred, job(two.first), str(two.second), spoil, ends
    )
    assert not answer[0]
    assert ("norm.weight: found shape [1]" if ends else "without an end") in answer[1]
    assert "written: model." in answer[1]
    assert (connections, taken, closed) == (1, 6, True)
    assert after != before


def test_a_transfer_into_an_open_session_is_heard_out_and_dropped(inside, two: Two):
    answer, connections, taken, before, after, closed = inside.run(
        transferred, job(two.first), str(two.second), "", True, True
    )
    assert not answer[0]
    assert "update_weights_from_ipc is a session of its own" in answer[1]
    assert (connections, taken, closed) == (1, 6, False)
    assert after == before


# --- launches ---------------------------------------------------------------------------------------------------------


def kernels(change):
    """Let the FP8 linears of a load be prepared as `change(layer)` does: a fake of a GPU's layout for its kernels."""
    from contextlib import contextmanager
    from unittest.mock import patch

    from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod

    @contextmanager
    def around():
        with patch.object(Fp8LinearMethod, "process_weights_after_loading", lambda _, layer: change(layer)):
            yield

    return around


def reorder(layer):
    import torch

    weight = layer.weight.data.view(torch.uint8)
    weight.copy_(weight.roll(1, 0))


def reshape(layer):
    layer.weight.data = layer.weight.data.t().contiguous()[:, :1]


PARTIAL = ("layers.1.attn.wq_b.weight", "layers.1.attn.wq_b.scale")


def reordering(load: Load, other: str):
    """A session on a launch that reorders in place: half of a fused module, then the rest; and what was prepared."""
    with managers.managed(load, around=kernels(reorder)) as managed:
        fused = [("layers.1.attn.wq_a.weight",), ("layers.1.attn.wq_a.scale",)]
        half = [name for names in fused for name in names]
        rest = [name.replace("wq_a", "wkv") for name in half]
        before = managed.digests()["target"]
        answers = [managed.call("begin_weight_update")]
        answers.append(managed.send(tensors_of(other, (*PARTIAL, *half))))
        answers.append(managed.call("end_weight_update"))
        answers.append(managed.send(tensors_of(other, rest)))
        answers.append(managed.call("end_weight_update"))
        return answers, before, managed.digests()["target"]


def reordered_alone(load: Load):
    with managers.managed(load, around=kernels(reorder)) as managed:
        return managed.digests()["target"]


def test_modules_that_are_reordered_in_place_are_updated_whole_and_the_others_left_alone(inside, two: Two):
    answers, before, after = inside.run(reordering, job(two.first), str(two.second))
    assert [success for success, _ in answers] == [True, True, False, True, True], answers
    assert "model.layers.1.self_attn.wqkv_a" in answers[2][1]
    assert "wq_b" not in answers[2][1]
    fresh = inside.run(reordered_alone, job(two.second))
    written = {name for name in before if re.search(r"layers\.1\.self_attn\.(wqkv_a|wq_b)\.", name)}
    assert len(written) == 4
    assert {name for name in before if after[name] != before[name]} == written
    assert all(after[name] == fresh[name] for name in written)


def reshaped(load: Load, other: str):
    with managers.managed(load, around=kernels(reshape)) as managed:
        begun = managed.call("begin_weight_update")
        disk = managed.call("update_weights_from_disk", model_path=other)
        return begun, disk, managed.models["target"].loader_state.session is None


def test_a_launch_that_gave_its_parameters_another_shape_is_refused_before_a_session(inside, two: Two):
    begun, disk, closed = inside.run(reshaped, job(two.first), str(two.second))
    for success, message in (begun, disk):
        assert not success
        assert "this launch cannot be updated" in message
        assert re.search(r"wq_b\.weight: shape .* by Fp8LinearMethod", message)
    assert closed
