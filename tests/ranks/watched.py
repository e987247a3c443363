"""Contexts for a rank's loads: the streamer watched, NVFP4 loaded as far as a CPU goes."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch


class NotDistributedError(RuntimeError):
    """The streamer shared a read that it was not to share, or the other way round."""


@contextmanager
def streamer_shares(expected: tuple[int, ...]) -> Iterator[None]:
    """Look into the streamer itself: NotDistributedError unless its shared reads were among so many ranks each.

    expected: for each shared read, the size of the group of ranks that it broadcasts in; () for none.
    """
    from runai_model_streamer import DistributedStreamer

    get_chunks, groups = DistributedStreamer.get_chunks, []

    def watched(self: DistributedStreamer) -> Iterator:
        import torch

        if self.is_distributed:
            groups.append(torch.distributed.get_world_size(self.distributed_streamer.distribution_group))
        return get_chunks(self)

    with patch.object(DistributedStreamer, "get_chunks", watched):
        yield
    if tuple(groups) != expected:
        raise NotDistributedError(f"shared reads among {groups} ranks, not {list(expected)}")


@contextmanager
def nvfp4_as_on_a_gpu() -> Iterator[None]:
    """A load of NVFP4 experts up to the last written parameter, where a CPU must stop.

    Lets the launch through that is refused on a CPU, and leaves out SGLang's post-processing, which is a GPU's. The
    runner keeps w1's and w3's tensor scales apart, as those of Blackwell do.
    """
    from sglang.srt.model_loader.loader import DefaultModelLoader

    from sglang_dsv4.decisions.decide import Decision
    from sglang_dsv4.models.loading import plan

    with (
        patch.object(Decision, "raise_if_refused", lambda self: None),
        patch.object(DefaultModelLoader, "postprocess_weights", staticmethod(lambda model, target_device: None)),
        patch.object(plan, "_runs_marlin", lambda: False),
    ):
        yield


NVFP4_ARGUMENTS = ("--moe-runner-backend", "marlin")
