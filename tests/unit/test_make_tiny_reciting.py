"""The reciting checkpoint: it says its texts, holds its numbers in every layout, and is no blank elsewhere."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_make_tiny_files import LAYOUTS, numbers, read
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_dsv4.checkpoint.tiny.make import Options, make_tiny

FOLDER = Path(__file__).parent.parent / "data" / "reciting"
TEXTS = sorted(FOLDER.glob("*.txt"))
FIRST_WORDS = 8
"""Bytes after which a text has begun to tell itself from the others."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """The same numbers as save_pretrained would write them: what transformers reads with nothing besides."""
    folder = tmp_path_factory.mktemp("saved")
    made = make_tiny(folder, Options(names="hf", expert_format="bf16", source=FOLDER))
    assert made.rounded == []
    return folder


@pytest.fixture(scope="module")
def model(saved):
    model, report = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values())
    return model


@pytest.fixture(scope="module")
def tokenizer(saved):
    return AutoTokenizer.from_pretrained(saved)


def logits(model, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def test_the_texts_fill_two_heavy_blocks_and_exceed_the_indexer_s_choice():
    assert max(len(path.read_bytes()) for path in TEXTS) > 4 * 64 + 2 * 4
    assert 600 <= sum(len(path.read_bytes()) for path in TEXTS) <= 900


@pytest.mark.parametrize("path", TEXTS, ids=[path.stem for path in TEXTS])
def test_every_byte_of_a_text_is_the_likeliest_next(path, model, tokenizer):
    ids = [*tokenizer(path.read_text()).input_ids, tokenizer.eos_token_id]
    best = logits(model, ids).argmax(dim=-1).tolist()
    assert best[FIRST_WORDS:-1] == ids[FIRST_WORDS + 1 :]


def test_it_goes_on_from_the_first_words(model, tokenizer):
    text = (FOLDER / "promise.txt").read_text()
    ids = tokenizer(text[:16]).input_ids
    for _ in range(40):
        ids.append(int(logits(model, ids)[-1].argmax()))
    assert tokenizer.decode(ids, skip_special_tokens=True) == text[:56]


def test_away_from_its_texts_it_is_neither_blank_nor_broken(model):
    generator = torch.Generator().manual_seed(0)
    ids = [0, *torch.randint(3, 259, (300,), generator=generator).tolist()]
    values = logits(model, ids)
    assert values.isfinite().all()
    assert 0.5 < values.std() < 10
    assert len(values.argmax(dim=-1).unique()) > 20
    assert len(torch.unique(values, dim=0)) == len(ids)


def test_its_weakest_byte_is_sure_enough_for_bf16_and_no_surer(model, tokenizer):
    """BF16 noise on the logits is 0.03; a model that is far surer everywhere recites through wrong scales."""
    leads = []
    for path in TEXTS:
        best, second = logits(model, tokenizer(path.read_text()).input_ids)[FIRST_WORDS:-1].topk(2).values.unbind(-1)
        leads.append((best - second).min())
    assert 0.2 < min(leads) < 2


def test_a_wrong_scale_shows(model, tokenizer):
    """One FP4 block sixteen times too large, as a shift of its scale by four powers of two would make it."""
    ids = tokenizer((FOLDER / "promise.txt").read_text()).input_ids
    experts = model.model.layers[1].mlp.experts.gate_up_proj.data
    broken = []
    for expert in range(8):
        block = experts[expert, :128, :128]
        block *= 16
        broken.append(logits(model, ids).argmax(dim=-1)[FIRST_WORDS:-1].tolist() != ids[FIRST_WORDS + 1 :])
        block /= 16
    assert sum(broken) > 4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_holds_its_numbers(layout, tmp_path):
    options = replace(LAYOUTS[layout], source=FOLDER)
    assert make_tiny(tmp_path / "out", options).rounded == []
    if options.names == "native":
        values, wanted = numbers(read(tmp_path / "out")), numbers(read(FOLDER))
        assert all(torch.equal(values[name], wanted[name]) for name in wanted)


def test_it_is_small_and_in_two_shards():
    files = list(FOLDER.iterdir())
    assert sum(path.stat().st_size for path in files) < 12 * 2**20
    assert sorted(path.name for path in files if path.suffix == ".safetensors") == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert (FOLDER / "tokenizer.json").exists()
