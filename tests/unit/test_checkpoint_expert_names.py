"""What a native name says of an expert, and which names say nothing of one."""

import grammar
import pytest

from sglang_dsv4.checkpoint.expert_names import expert_name, stack_name

NO_EXPERTS = (
    "layers.3.ffn.gate.weight",
    "layers.3.ffn.experts.11.w4.weight",
    "layers.3.ffn.experts.11.w1",
    "layers.3.ffn.experts.11.w1.weight.more",
    "layers.3.ffn.experts.eleven.w1.weight",
    "layers.3.attn.experts.11.w1.weight",
    "layers.3.ffn.shared_experts.0.w1.weight",
    "layers.3.ffn.my_experts.11.w1.weight",
    "mtp.0.markov_head.markov_w1.weight",
    "experts.11.w1.weight",
    "w1",
    "",
)


def test_a_routed_expert():
    expert = expert_name("layers.3.ffn.experts.11.w1.weight")
    assert expert == ("layers.3", 11, "w1", "weight")
    assert not expert.is_shared
    assert (expert.expert, expert.module) == ("layers.3.ffn.experts.11", "layers.3.ffn.experts.11.w1")


def test_a_shared_expert():
    expert = expert_name("mtp.0.ffn.shared_experts.w2.scale")
    assert expert == ("mtp.0", None, "w2", "scale")
    assert expert.is_shared
    assert (expert.expert, expert.module) == ("mtp.0.ffn.shared_experts", "mtp.0.ffn.shared_experts.w2")


@pytest.mark.parametrize(
    ("stack", "leaf"), [("gate_up_proj", "weight"), ("down_proj", "weight"), ("down_proj", "scale")]
)
def test_a_stack_is_no_expert(stack, leaf):
    name = f"layers.3.ffn.experts.{stack}{'_scale' if leaf == 'scale' else ''}"
    found = stack_name(name)
    assert found == ("layers.3", stack, leaf)
    assert found.module == f"layers.3.ffn.experts.{stack}"
    assert expert_name(name) is None


@pytest.mark.parametrize("name", NO_EXPERTS)
def test_nothing_else_is_an_expert(name):
    assert expert_name(name) is None
    assert stack_name(name) is None


@pytest.mark.parametrize("layout", ["native_fp4_fp8", "nvfp4_modelopt"])
def test_every_expert_of_a_release_is_found_and_spelled_back(layout):
    names = list(grammar.expand(layout, "tiny_flash", "mtp"))
    found = {name: expert for name in names if (expert := expert_name(name)) is not None}
    assert found.keys() == {
        name for name in names if "experts" in name.split(".") or "shared_experts" in name.split(".")
    }
    assert [expert.name for expert in found.values()] == list(found)
    assert {expert.number for expert in found.values()} == {None, *range(8)}
