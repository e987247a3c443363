"""What a checkpoint spells otherwise or leaves out, and what drafts bring or are lent."""

import json
import os
import shutil
from unittest.mock import patch

import jobs
import layouts
import numpy as np
import pytest
import shards

from sglang_dsv4.errors import ConfigError, IncompleteLoadError, LayoutError


@pytest.fixture
def changed(made, tmp_path):
    """A copy of the native checkpoint with changed tensors and config."""

    def make(change, draft="none", **config):
        folder = shards.edited(made(draft=draft), tmp_path / "checkpoint", change)
        return layouts.configured(folder, **config)

    return make


def unchanged(files):
    pass


# --- spellings of the root --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("embed", "norm", "head"),
    [
        ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"),
        ("embed_tokens.weight", "final_norm.weight", "output.weight"),
    ],
)
def test_other_spellings_of_the_root_are_taken_and_said(changed, plain, made, embed, norm, head):
    found = plain(changed(layouts.renamed(("embed.weight", embed), ("norm.weight", norm), ("head.weight", head))))
    assert found.digests == plain(made()).digests
    taken = {f"{other} is taken for {native}" for other, native in ((embed, "embed"), (norm, "norm"), (head, "head"))}
    assert {line.removesuffix(".weight") for line in found.report["fallbacks"]} == taken


def test_a_root_tensor_that_is_nowhere_is_an_error_that_lists_what_was_tried(changed, loader):
    with pytest.raises(IncompleteLoadError) as caught:
        loader.load(changed(shards.drop("norm.weight")))
    assert caught.value.details == ("missing: norm.weight (nor as model.norm, final_norm)",)


# --- the head ---------------------------------------------------------------------------------------------------------


def test_without_a_head_the_embedding_is_the_head(changed, plain, made):
    found, whole = plain(changed(shards.drop("head.weight"))), plain(made())
    assert found.digests["lm_head.weight"] == whole.digests["model.embed_tokens.weight"]
    assert found.digests | {"lm_head.weight": whole.digests["lm_head.weight"]} == whole.digests
    assert found.report["fallbacks"] == ["the output head is the embedding: there is no head.weight"]


def test_a_tied_head_is_not_served_in_place_of_one_that_is_there(changed, loader):
    with pytest.raises(ConfigError, match="tie_word_embeddings: the embedding would be served as the head"):
        loader.load(changed(unchanged, tie_word_embeddings=True))


def test_a_config_that_ties_the_head_is_followed(changed, plain, made):
    found = plain(changed(shards.drop("head.weight"), tie_word_embeddings=True))
    tied = {name: digest for name, digest in plain(made()).digests.items() if name != "lm_head.weight"}
    assert found.digests == tied  # one module under two names
    assert found.report["fallbacks"] == ["the output head is the embedding: config.json says so"]


@pytest.mark.parametrize("tied", [True, False])
def test_the_last_pipeline_stage_reads_the_embedding_for_a_tied_head(changed, loader, made, plain, tied):
    checkpoint = changed(shards.drop("head.weight"), tie_word_embeddings=tied)
    last = loader.load(checkpoint, arguments=("--pp-size", "2"), pp_rank=1)
    assert last.digests["lm_head.weight"] == plain(made()).digests["model.embed_tokens.weight"]
    assert "model.embed_tokens.weight" not in last.digests


# --- sinks and position tables ----------------------------------------------------------------------------------------


def test_a_layer_without_a_sink_gets_one_that_weighs_nothing(changed, loader, made, plain):
    name = "model.layers.1.self_attn.attn_sink"
    found = loader.load(changed(shards.drop("layers.1.attn.attn_sink")), keep=name.replace(".", r"\."))
    sink = found.kept[name]
    assert np.all(np.exp(sink - np.float32(-1e4)) == 0)  # beside the smallest logit that attention could have
    assert np.all(np.isfinite(sink))
    others = {key: digest for key, digest in plain(made()).digests.items() if key != name}
    assert {key: digest for key, digest in found.digests.items() if key != name} == others
    assert found.report["fallbacks"] == ["no layers.1.attn.attn_sink: no sink in that layer (a logit of -1e+30)"]


@pytest.mark.parametrize("name", ["layers.1.attn.compressor.ape", "layers.3.attn.indexer.compressor.ape"])
def test_a_missing_position_table_is_an_error(changed, loader, name):
    with pytest.raises(IncompleteLoadError) as caught:
        loader.load(changed(shards.drop(name)))
    assert caught.value.details == (f"missing: {name}",)


# --- routing by token id ----------------------------------------------------------------------------------------------


def first_column(files):
    """What a build for fewer experts per token does to the table of the hash layer."""
    name = "layers.0.ffn.gate.tid2eid"
    shard = shards.of(files, name)
    table = np.frombuffer(shard[name].data, np.int64).reshape(shard[name].shape)
    shard[name] = shards.Tensor("I64", (len(table), 1), np.ascontiguousarray(table[:, :1]).tobytes())


def test_a_table_for_fewer_experts_per_token_loads_with_its_config(changed, loader):
    name = "model.layers.0.mlp.topk.tid2eid"
    found = loader.load(changed(first_column, num_experts_per_tok=1), keep=name.replace(".", r"\."))
    assert found.kept[name].shape == (512, 1)


def test_a_table_of_another_width_than_the_configs_is_refused(changed, loader):
    with pytest.raises(IncompleteLoadError) as caught:
        loader.load(changed(first_column))
    assert caught.value.details == ("wrong: layers.0.ffn.gate.tid2eid: found shape [512, 1], expected [512, 2]",)


# --- config.json of newer Transformers --------------------------------------------------------------------------------


def config_seen(model: str) -> dict:
    """What SGLang's model classes read, of the config that a server would have."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.utils.hf_transformers_utils import get_rope_config

    from sglang_dsv4.models.loading.rank import parallel_context, server_arguments

    arguments = server_arguments(model, log_level="error")
    with patch.dict(os.environ), parallel_context(arguments) as server_args:
        config = ModelConfig.from_server_args(server_args).hf_config
    theta, scaling = get_rope_config(config)
    keys = ("compress_ratios", "num_hash_layers", "qk_rope_head_dim", "compress_rope_theta")
    return {key: getattr(config, key) for key in keys} | {"theta": theta, "scaling": dict(scaling)}


def test_sglang_reads_the_same_config_in_both_spellings(loader, made):
    released, newer = made(), made(names="hf", expert_format="fp4")
    written = json.loads((newer / "config.json").read_text())
    assert not {"compress_ratios", "rope_scaling", "num_hash_layers"} & written.keys()
    assert loader.run(config_seen, str(newer)) == loader.run(config_seen, str(released))


# --- drafts -----------------------------------------------------------------------------------------------------------

OWN = {
    "mtp": ("mtp.0.emb.tok_emb.weight", "mtp.0.head.weight", "model.embed_tokens.weight"),
    "dspark": ("mtp.0.embed.weight", "mtp.2.head.weight", "embed_tokens.weight"),
}


@pytest.mark.parametrize("draft", OWN)
@pytest.mark.parametrize("has", ["both", "embedding", "head"])
def test_a_drafts_own_vocabulary_wins_and_the_rest_is_lent(changed, loader, made, plain, draft, has):
    embed, head, parameter = OWN[draft]
    change = layouts.own_vocabulary(embed if has != "head" else "", head if has != "embedding" else "")
    found = loader.load(changed(change, draft=draft), draft=True, keep=r"embed_tokens|lm_head")
    own = {parameter: 1.0} if has != "head" else {}
    own |= {"lm_head.weight": 2.0} if has != "embedding" else {}
    for name, value in own.items():
        assert np.all(found.kept[name][:512] == value)
    rest = {name: digest for name, digest in found.digests.items() if name not in own}
    assert rest == plain(made(draft=draft), draft=True).digests
    whose = ["its own" if part in has or has == "both" else "the target's" for part in ("embedding", "head")]
    assert found.report["fallbacks"] == [
        f"embedding of the draft: {whose[0]}",
        f"output head of the draft: {whose[1]}",
    ]


@pytest.mark.parametrize("draft", OWN)
def test_the_target_does_not_take_the_drafts_vocabulary(changed, loader, made, plain, draft):
    checkpoint = changed(layouts.own_vocabulary(*OWN[draft][:2]), draft=draft)
    assert loader.load(checkpoint).digests == plain(made()).digests


def lent(draft: jobs.Load) -> list[float]:
    """Values of a draft's embedding and head after the server's worker has lent it the target's (all threes)."""
    import torch
    from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    with jobs.loaded(draft) as model, torch.no_grad():
        embed, head = VocabParallelEmbedding(512, 256), ParallelLMHead(512, 256)
        embed.weight.fill_(3)
        head.weight.fill_(3)
        if hasattr(model, "attach_shared_modules"):
            model.attach_shared_modules(embed_tokens=embed, lm_head=head)
            modules = (model.embed_tokens, model.lm_head)
        else:
            model.model.embed_tokens.weight, model.lm_head.weight = model.vocabulary(embed.weight, head.weight)
            modules = (model.model.embed_tokens, model.lm_head)
        return [float(module.weight[7, 7]) for module in modules]


@pytest.mark.parametrize("draft", OWN)
@pytest.mark.parametrize(("has", "used"), [("both", [1, 2]), ("embedding", [1, 3]), ("head", [3, 2]), ("none", [3, 3])])
def test_what_the_worker_lends_does_not_replace_the_drafts_own(changed, loader, draft, has, used):
    embed, head, _ = OWN[draft]
    change = layouts.own_vocabulary(
        embed if has in ("both", "embedding") else "", head if has in ("both", "head") else ""
    )
    checkpoint = changed(change, draft=draft)
    assert loader.run(lent, jobs.Load(str(checkpoint), draft=True)) == used


def test_the_markov_head_has_two_spellings(changed, plain, made):
    at = "mtp.2.markov_head"
    pairs = [(f"{at}.markov_w1.weight", f"{at}.embed.weight"), (f"{at}.markov_w2.weight", f"{at}.head.weight")]
    found = plain(changed(layouts.renamed(*pairs), draft="dspark"), draft=True)
    assert found.digests == plain(made(draft="dspark"), draft=True).digests
    assert found.report["fallbacks"][:2] == [f"{new} is taken for {old}" for old, new in pairs]


def test_a_draft_may_lack_its_confidence_head(changed, plain, made):
    found = plain(changed(shards.drop("mtp.2.confidence_head.proj.weight"), draft="dspark"), draft=True)
    assert found.digests == plain(made(draft="dspark"), draft=True).digests


def test_a_draft_with_a_gap_in_its_stages_is_refused(changed, loader):
    def change(files):
        for shard in files.values():
            for name in [name for name in shard if name.startswith("mtp.1.")]:
                shard[name.replace("mtp.1.", "mtp.3.")] = shard.pop(name)

    with pytest.raises(LayoutError, match="the draft has a gap in its stages") as caught:
        loader.load(changed(change, draft="dspark"), draft=True)
    assert caught.value.found == "mtp.{0,2,3}"


@pytest.mark.parametrize("draft", OWN)
def test_a_draft_loads_from_a_repository_of_its_own(loader, made, plain, tmp_path, draft):
    alone = tmp_path / "draft"
    shutil.copytree(made(draft=draft), alone, ignore=shutil.ignore_patterns("*.safetensors", shards.INDEX))
    files = shards.read(made(draft=draft))
    layouts.only_draft(files)
    for name, shard in enumerate(files.values()):
        shards.write_shard(alone / f"draft-{name}.safetensors", shard)
    arguments = ("--speculative-draft-model-path", str(alone), *(jobs.NEXTN if draft == "mtp" else ()))
    if draft == "mtp":
        arguments += ("--speculative-num-draft-tokens", "2")
    found = loader.load(made(expert_format="fp8"), draft=True, arguments=arguments)
    assert found.digests == plain(made(draft=draft), draft=True).digests
