"""Checkpoints to update with, what a client of a server sends, and what the server is seen to serve."""

import base64
import json
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.multiprocessing
from safetensors.torch import load_file, save_file

sys.path.append(str(Path(__file__).parent.parent / "serving"))
import servers

Tensors = dict[str, torch.Tensor]
Named = Sequence[tuple[str, torch.Tensor]]

PROMPT = list(range(3, 43))
TOKENS = 4
PATIENCE = 400  # s: a machine that runs other tests too starts a server in minutes

torch.multiprocessing.set_sharing_strategy("file_system")  # a file descriptor would need this process to hand it over


RECITING = Path(__file__).parent.parent / "data" / "reciting"
NEXTN = "--speculative-algorithm EAGLE --speculative-num-steps 1 --speculative-eagle-topk 1"
HEALTH_SECONDS = 4  # how long /health of the server of two ranks waits for a sign of life


class Two(NamedTuple):
    """The folders of A, which recites, and of B, whose every tensor is another one."""

    first: Path
    second: Path


class Serving(NamedTuple):
    """A server and the log-probabilities of the weights that it started with."""

    server: servers.Server
    ranks: int
    alone: list[float]


class Answer(NamedTuple):
    """What a call comes back with."""

    status: int
    success: bool
    message: str


def call(server: servers.Server, path: str, body: dict[str, Any] | None = None, timeout: float = 120) -> Answer:
    """Post to a control route, refused or not."""
    request = urllib.request.Request(
        server.url(path), json.dumps(body or {}).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            status, text = answer.status, answer.read()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read()
    parsed = json.loads(text)
    return Answer(status, parsed.get("success", False), parsed.get("message", text.decode()))


def serialised(payload: Any, ranks: int = 1) -> list[str]:
    """A payload for each rank, as SGLang's client sends it."""
    return [base64.b64encode(_shared(payload)).decode() for _ in range(ranks)]


def _shared(payload: Any) -> bytes:
    """torch waits one second for its process that shares memory, which is short on a busy machine."""
    from sglang.srt.utils import MultiprocessingSerializer

    for _ in range(5):
        with suppress(RuntimeError):
            return MultiprocessingSerializer.serialize(payload)
    return MultiprocessingSerializer.serialize(payload)


def send(server: servers.Server, named: Named, ranks: int = 1, **body: Any) -> Answer:
    """One bucket of tensors."""
    return call(
        server, "/update_weights_from_tensor", {"serialized_named_tensors": serialised(list(named), ranks), **body}
    )


def send_flat(server: servers.Server, named: Named, ranks: int = 1, **body: Any) -> Answer:
    """One bucket as bytes in one buffer, the largest elements first so that each lies as its dtype needs it."""
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    bucket = FlattenedTensorBucket(named_tensors=sorted(named, key=lambda item: -item[1].element_size()))
    payload = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
    body = {"serialized_named_tensors": serialised(payload, ranks), "load_format": "flattened_bucket", **body}
    return call(server, "/update_weights_from_tensor", body)


def tensors_of(folder: Path) -> Tensors:
    """Every tensor of a checkpoint."""
    found: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def buckets(tensors: Tensors, count: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """`count` buckets that tear pairs apart: every tensor goes to the bucket of its number."""
    named = sorted(tensors.items())
    for start in range(count):
        yield named[start::count]


def changed(source: Path, folder: Path, *, change: Any) -> Path:
    """A copy of a checkpoint in which `change(name, tensor)` stands for every tensor; None leaves it out."""
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, folder / path.name)
            continue
        new = {name: change(name, tensor) for name, tensor in load_file(path).items()}
        kept = {name: tensor.contiguous() for name, tensor in new.items() if tensor is not None}
        save_file(kept, folder / path.name, metadata={"format": "pt"})
    return folder


def rolled(source: Path, folder: Path) -> Path:
    """Another model of the same form: every tensor is turned round by one along its first dimension."""

    def turned(_name: str, tensor: torch.Tensor) -> torch.Tensor:
        raw = tensor if tensor.element_size() > 1 else tensor.view(torch.uint8)
        return raw.roll(1, 0).view(tensor.dtype)

    return changed(source, folder, change=turned)


def logprobs(server: servers.Server) -> list[float]:
    """Of a fixed prompt, and the tokens that greedily follow it: the weights' fingerprint.

    Those of what follows are left out: a draft's tokens are verified in another order of sums.
    """
    answer = server.generate(PROMPT, TOKENS, return_logprob=True, logprob_start_len=0)
    meta = answer["meta_info"]
    prompt = [value for value, *_ in meta["input_token_logprobs"] if value is not None]
    assert len(prompt) == len(PROMPT) - 1
    return [*prompt, *answer["output_ids"]]


def fresh_logprobs(server: servers.Server) -> list[float]:
    """The same, with nothing cached."""
    server.flush()
    return logprobs(server)


def healthy(server: servers.Server) -> bool:
    """What /health says."""
    try:
        urllib.request.urlopen(server.url("/health"), timeout=60).close()
        return True
    except urllib.error.HTTPError:
        return False


def failed(answers: Iterable[Answer]) -> list[Answer]:
    """Those that refused."""
    return [answer for answer in answers if not answer.success]
