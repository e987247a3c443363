"""A server is brought from A to B and back, and serves what each serves alone; bad updates in between do nothing."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import pytest
import servers_updates as updates
import torch
from servers_updates import Serving, Two

BUCKETS = 50


def refit(serving: Serving, folder: Path, *, flat: bool = False, **body: object) -> updates.Answer:
    """All of a checkpoint in buckets, in a session."""
    send = updates.send_flat if flat else updates.send
    begun = updates.call(serving.server, "/begin_weight_update")
    assert begun.success, begun.message
    tensors = updates.tensors_of(folder)
    answers = [send(serving.server, bucket, serving.ranks, **body) for bucket in updates.buckets(tensors, BUCKETS)]
    assert len(answers) == BUCKETS
    assert not updates.failed(answers)
    return updates.call(serving.server, "/end_weight_update")


@contextmanager
def traffic(server: updates.servers.Server) -> Iterator[list[list[int]]]:
    """Requests one after the other for the time of the block; the tokens that came. None may fail."""
    served: list[list[int]] = []
    ended = Event()

    def ask() -> None:
        while not ended.is_set():
            served.append(server.generate(updates.PROMPT, updates.TOKENS)["output_ids"])

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        try:
            yield served
        finally:
            ended.set()
        asking.result()


def test_a_refit_and_back_paused_and_unpaused_serves_what_each_checkpoint_serves(
    drafting: Serving, two_ranks: Serving, two: Two
):
    server, (first, second) = drafting.server, (drafting.alone, two_ranks.alone)
    assert first != second
    with traffic(server) as served:
        ended = refit(drafting, two.second, flush_cache=False)
    assert len(served) > 1
    assert ended.success, ended.message
    assert "never written" not in ended.message
    assert updates.fresh_logprobs(server) == second
    assert "target: DeepseekV4ForCausalLM: " in ended.message
    assert "draft: DeepseekV4ForCausalLMNextN: " in ended.message

    server.post("/pause_generation", {"mode": "in_place"})
    ended = refit(drafting, two.first, flat=True, flush_cache=False)
    assert ended.success, ended.message
    server.post("/continue_generation", {})
    server.flush()
    assert updates.logprobs(server) == first
    assert updates.healthy(server)


def test_a_refit_of_two_ranks(drafting: Serving, two_ranks: Serving, two: Two):
    server = two_ranks.server
    answer = updates.call(server, "/update_weights_from_disk", {"model_path": str(two.first)})
    assert answer.success, answer.message
    assert "never written" not in answer.message
    assert updates.logprobs(server) == drafting.alone
    assert refit(two_ranks, two.second).success
    assert updates.logprobs(server) == two_ranks.alone


def whole_folder(change):
    """A bad update from disk: a copy of A with a change, given as (folder of A, empty folder) -> path."""

    def send(serving: Serving, two: Two, scratch: Path) -> updates.Answer:
        path = change(two.first, scratch / "bad")
        return updates.call(serving.server, "/update_weights_from_disk", {"model_path": str(path)})

    return send


def bucket(*named):
    """A bad bucket in a session: (name, change of that tensor of B)."""

    def send(serving: Serving, two: Two, _scratch: Path) -> updates.Answer:
        tensors = updates.tensors_of(two.second)
        tensors["stranger.weight"] = tensors["norm.weight"]
        return updates.send(serving.server, [(name, change(tensors[name])) for name, change in named], serving.ranks)

    return send


def with_nan(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if name != "layers.2.ffn.experts.3.w2.scale":
        return tensor
    raw = tensor.view(torch.uint8).clone()
    raw[0, 0] = 255  # E8M0's only NaN
    return raw.view(tensor.dtype)


def corrupt(source: Path, folder: Path) -> Path:
    updates.changed(source, folder, change=lambda _, tensor: tensor)
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    return folder


def stranger_s_config(source: Path, folder: Path) -> Path:
    updates.changed(source, folder, change=lambda _, tensor: tensor)
    config = folder / "config.json"
    text = config.read_text()
    assert '"swiglu_limit": 10.0' in text
    config.write_text(text.replace('"swiglu_limit": 10.0', '"swiglu_limit": 7.0'))
    return folder


def without(lost: str):
    return lambda source, folder: updates.changed(
        source, folder, change=lambda name, tensor: None if name == lost else tensor
    )


def as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


IN_A_SESSION = {
    "unknown name": (bucket(("norm.weight", as_it_is), ("stranger.weight", as_it_is)), "unexpected: stranger.weight"),
    "wrong shape": (bucket(("norm.weight", lambda tensor: tensor[:3].clone())), "found shape [3], expected [256]"),
    "wrong dtype": (bucket(("layers.1.attn.wq_b.weight", torch.Tensor.float)), "found dtype F32, expected F8_E4M3"),
    "direct": (
        lambda serving, two, _: updates.send(
            serving.server, [("model.norm.weight", torch.ones(256))], serving.ranks, load_format="direct"
        ),
        "load_format 'direct' is not taken",
    ),
    "bad load_format": (
        lambda serving, two, _: updates.send(serving.server, [], serving.ranks, load_format="zip"),
        "load_format 'zip' is not taken",
    ),
    "empty payload": (
        lambda serving, two, _: updates.call(
            serving.server, "/update_weights_from_tensor", {"serialized_named_tensors": []}
        ),
        "found 0 payloads; expected 1",
    ),
    "no pickle": (
        lambda serving, two, _: updates.call(
            serving.server, "/update_weights_from_tensor", {"serialized_named_tensors": ["AAAA"]}
        ),
        "Nothing of this call was written",
    ),
    "lists of different length": (
        lambda serving, two, _: updates.call(
            serving.server, "/update_weights_from_distributed", {"names": ["a"], "dtypes": [], "shapes": [[1]]}
        ),
        "names, dtypes and shapes differ in length: 1, 0 and 1",
    ),
    "disk": (whole_folder(lambda source, _: source), "update_weights_from_disk is a session of its own"),
    "ipc": (
        lambda serving, two, _: updates.call(serving.server, "/update_weights_from_ipc", {"zmq_handles": {}}),
        "update_weights_from_ipc is a session of its own",
    ),
    "another begin": (
        lambda serving, two, _: updates.call(serving.server, "/begin_weight_update"),
        "already open",
    ),
}

ALONE = {
    "missing folder": (whole_folder(lambda _, folder: folder), "no such model folder"),
    "corrupt shard": (whole_folder(corrupt), "the shard is cut short"),
    "half pair": (whole_folder(without("layers.1.attn.wq_b.scale")), "layers.1.attn.wq_b.scale"),
    "NaN scale": (
        whole_folder(lambda source, folder: updates.changed(source, folder, change=with_nan)),
        "layers.2.ffn.experts.3.w2.scale",
    ),
    "stranger's config": (whole_folder(stranger_s_config), "swiglu_limit: 7.0, served 10.0"),
    "bad load_format from disk": (
        lambda serving, two, _: updates.call(
            serving.server, "/update_weights_from_disk", {"model_path": str(two.first), "load_format": "nonsense"}
        ),
        "load_format 'nonsense' is none",
    ),
    "no session": (bucket(("norm.weight", as_it_is)), "must run between begin_weight_update() and end_weight_update()"),
}


@pytest.mark.parametrize("which", ["alone", "in a session"])
def test_bad_updates_are_refused_by_name_and_leave_the_old_weights_serving(drafting, two, tmp_path, which):
    server, cases = drafting.server, ALONE if which == "alone" else IN_A_SESSION
    served = updates.fresh_logprobs(server)
    if which != "alone":
        assert updates.call(server, "/begin_weight_update").success
    for number, (case, (send, expected)) in enumerate(cases.items()):
        scratch = tmp_path / str(number)
        scratch.mkdir()
        answer = send(drafting, two, scratch)
        assert expected in answer.message, (case, answer)
        assert (answer.status, answer.success) == (400, False), (case, answer)
        assert updates.logprobs(server) == served, case  # 40 tokens are no page: nothing of them is cached
    if which != "alone":
        assert updates.call(server, "/end_weight_update").success
    assert updates.fresh_logprobs(server) == served
    assert updates.healthy(server)
