"""Faults of old, planted again in a rank's loads: each a context that takes a safeguard, or the mending, away."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch


@contextmanager
def each_its_own_list() -> Iterator[None]:
    """Ranks that share a read hand the streamer what they need themselves, as the first release did."""
    from sglang_dsv4.models.loading import source
    from sglang_dsv4.models.loading.agreement import Agreement, agree, in_file_order

    def alone_in_it(peers, checkpoint, infos, wanted, separate):
        agreed = agree(peers, checkpoint, infos, wanted, separate)
        mine = [info for info in in_file_order(infos.values()) if info.name in wanted]
        return Agreement(mine, agreed.shared, agreed.line)

    with patch.object(source, "agree", alone_in_it):
        yield


@contextmanager
def lists_unchecked() -> Iterator[None]:
    """Nobody compares the lists before they are read."""
    from sglang_dsv4.models.loading import source

    with patch.object(source, "require_one_list", lambda peers, listed: None):
        yield


@contextmanager
def foreign_scalars_dropped() -> Iterator[None]:
    """A rank keeps the input scales of its own NVFP4 experts only, though its parameter has a row for each."""
    from sglang_dsv4.models.loading import plan

    with patch.object(plan, "leaves_of_all_experts", lambda layer: set()):
        yield


@contextmanager
def one_expert_too_few() -> Iterator[None]:
    """The selection takes this rank's last expert for another rank's."""
    from sglang_dsv4.models.loading import plan
    from sglang_dsv4.models.loading.experts import kept_experts

    def fewer(layer):
        kept = kept_experts(layer)
        return kept - {max(kept)} if kept else kept

    with patch.object(plan, "kept_experts", fewer):
        yield


@contextmanager
def holes_unseen() -> Iterator[None]:
    """Nobody asks whether every parameter was written."""
    from sglang_dsv4.models.loading import state

    with patch.object(state, "unwritten", lambda *_: []):
        yield
