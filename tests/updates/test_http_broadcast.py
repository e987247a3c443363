"""Buckets that a trainer broadcasts, over gloo: what is refused is received first, since the trainer waits."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import servers_updates as updates
import torch
import torch.distributed
from servers_updates import Serving, Two, servers

GROUP = "trainer"


@contextmanager
def trainer(server: servers.Server) -> Iterator[Any]:
    """A process group of this process and the server's one rank."""
    from sglang.srt.utils import init_custom_process_group

    port = servers.free_port()
    body = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(
            updates.call, server, "/init_weights_update_group", body | {"group_name": GROUP, "backend": "gloo"}
        )
        group = init_custom_process_group(
            backend="gloo", init_method=f"tcp://127.0.0.1:{port}", world_size=2, rank=0, group_name=GROUP
        )
        assert joined.result().success
    try:
        yield group
    finally:
        assert updates.call(server, "/destroy_weights_update_group", {"group_name": GROUP}).success
        torch.distributed.destroy_process_group(group)


def broadcast(server: servers.Server, group: Any, named: updates.Named, **body: Any) -> updates.Answer:
    """Announce tensors and send them; returns when both have ended, which is what a trainer waits for."""
    announced = {
        "names": [name for name, _ in named],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in named],
        "shapes": [list(tensor.shape) for _, tensor in named],
        "group_name": GROUP,
    }
    if body.get("load_format") == "flattened_bucket":
        sent = [torch.cat([tensor.contiguous().flatten().view(torch.uint8) for _, tensor in named])]
    else:
        sent = [tensor.contiguous() for _, tensor in named]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(updates.call, server, "/update_weights_from_distributed", announced | body)
        for tensor in sent:
            torch.distributed.broadcast(tensor, src=0, group=group)
        return answer.result(timeout=120)


def test_a_broadcast_is_received_judged_and_only_then_refused_or_written(drafting: Serving, two: Two):
    server, own, other = drafting.server, updates.tensors_of(two.first), updates.tensors_of(two.second)
    norm = [("norm.weight", other["norm.weight"])]
    served = updates.fresh_logprobs(server)
    with trainer(server) as group:
        answer = broadcast(server, group, norm)
        assert not answer.success
        assert "must run between begin_weight_update() and end_weight_update()" in answer.message
        assert updates.call(server, "/begin_weight_update").success
        answer = broadcast(server, group, [*norm, ("stranger.weight", other["norm.weight"])])
        assert not answer.success
        assert "unexpected: stranger.weight" in answer.message
        assert updates.logprobs(server) == served
        assert broadcast(server, group, norm).success
        assert updates.logprobs(server) != served
        pair = ("layers.1.attn.wq_b.scale", "layers.1.attn.wq_b.weight")
        back = [(name, own[name]) for name in ("norm.weight", *pair)]
        back.sort(key=lambda item: -item[1].element_size())
        answer = broadcast(server, group, back, load_format="flattened_bucket")
        assert answer.success, answer.message
        assert "3 tensors" in answer.message
        assert updates.call(server, "/end_weight_update").success
    assert updates.fresh_logprobs(server) == served
