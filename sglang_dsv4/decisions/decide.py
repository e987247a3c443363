"""All decisions for one launch, from plain values: the same function serves the server's argument hook and `check`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from sglang_dsv4 import envs
from sglang_dsv4.checkpoint.layout import DraftKind
from sglang_dsv4.decisions import drafts, fp4, moe_backends
from sglang_dsv4.decisions.drafts import Speculation
from sglang_dsv4.decisions.fp4 import ExpertDecision, ExpertFacts
from sglang_dsv4.decisions.moe_backends import Case
from sglang_dsv4.decisions.moe_names import CUDA, DEQUANT, RUNNERS, Ep, Rocm
from sglang_dsv4.decisions.parallel import Part, Ranks, Setting, Sizes, parallel_refusals
from sglang_dsv4.decisions.parts import draft_part, draft_sizes, target_part
from sglang_dsv4.decisions.verdict import Refusal, raise_all

RUNNER_FLAG = "--moe-runner-backend"
A2A_FLAG = "--moe-a2a-backend"
DRAFT_RUNNER_FLAG = "--speculative-moe-runner-backend"
DRAFT_A2A_FLAG = "--speculative-moe-a2a-backend"


@dataclass(frozen=True)
class Flags:
    """The environment flags that steer a decision; None where not set."""

    experts: bool | None = None
    dequant: bool | None = None
    wo_a: bool | None = None
    wo_a_invrope: bool | None = None
    fuse_wqkv: bool = True
    shared_tp1: bool = False
    jit_deepgemm: bool = True
    aiter: bool = False
    flydsl: bool = False

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> Flags:
        """From the environment. Raises FlagError for a value that cannot be read."""
        return cls(
            experts=envs.FP4_EXPERTS.explicit(environ),
            dequant=envs.FP4_DEQUANT.explicit(environ),
            wo_a=envs.FP8_WO_A.explicit(environ),
            wo_a_invrope=envs.FP8_WO_A_INVROPE.explicit(environ),
            fuse_wqkv=envs.FUSE_WQA_WKV.get(environ),
            shared_tp1=envs.SHARED_EXPERT_TP1.get(environ),
            jit_deepgemm=envs.JIT_DEEPGEMM.get(environ),
            aiter=envs.USE_AITER.get(environ),
            flydsl=envs.FLYDSL_MEGA_MOE.get(environ),
        )


@dataclass(frozen=True)
class Inputs:
    """Everything a decision rests on, as plain values.

    target, draft   the routed experts of each; `draft` is None when the checkpoint has none
    draft_kind      what the draft that would be loaded is
    sizes           of the target; `draft_sizes` of the draft, None where they are the same
    quant_method, draft_quant_method   quant_method of the section that SGLang is given, None when it is given none
    unfit           why no section fits, as decided by decisions.quantization
    wo_a            "fp8", "bf16", "mixed", or None when not known; of the target and an MTP draft that is loaded
    ranks           parallel sizes and the all-to-all, as given
    runner          --moe-runner-backend
    arch            one of moe_names.ARCHS
    fuse_shared     --enforce-shared-experts-fusion
    padded          whether the loader may fill up slices that do not end on a block
    serving         False for a load outside a server, which needs no device for the draft
    """

    target: ExpertFacts
    sizes: Sizes
    arch: str
    draft: ExpertFacts | None = None
    draft_kind: DraftKind = DraftKind.NONE
    draft_sizes: Sizes | None = None
    quant_method: str | None = "fp8"
    draft_quant_method: str | None = "fp8"
    unfit: tuple[Refusal, ...] = ()
    wo_a: str | None = None
    flags: Flags = field(default_factory=Flags)
    ranks: Ranks = field(default_factory=Ranks)
    runner: str = "auto"
    fuse_shared: bool = False
    speculation: Speculation = field(default_factory=Speculation)
    padded: bool = False
    serving: bool = True

    @property
    def loads_draft(self) -> bool:
        """Whether a draft model will be built."""
        return self.speculation.algorithm is not None and self.draft is not None


@dataclass(frozen=True)
class Model:
    """What was decided for the target or the draft.

    experts   how its routed experts are stored and what they run as
    layout    the rules' name for that, with the block size told apart
    runner    the MoE runner that will run; None when refused
    asked     the runner that was asked for, or inherited from the target
    why       who chose the runner: "flag", "SGLang's default", "the target's" or "this package"
    """

    experts: ExpertDecision
    layout: str
    asked: str
    runner: str | None
    why: str

    @property
    def choice(self) -> str:
        """`asked`, or `asked -> runner`. A runner that stays `auto` is not entered: the all-to-all megamoe runs all."""
        runs = "the kernel of the all-to-all megamoe" if self.runner == "auto" else self.runner
        return self.asked if runs in (None, self.asked) else f"{self.asked} -> {runs}"


@dataclass(frozen=True)
class Decision:
    """The outcome. `refusals` is empty when the launch can work.

    declare      server arguments that we have to set, by SGLang's name
    environment  flags to write for child processes
    notes        what a person should know although nothing is wrong
    """

    target: Model | None
    draft: Model | None
    refusals: tuple[Refusal, ...]
    declare: Mapping[str, str]
    environment: Mapping[str, str]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing was refused."""
        return not self.refusals

    def raise_if_refused(self) -> None:
        """Raise RefusedError with all refusals together."""
        raise_all(self.refusals)

    def log_line(self) -> str:
        """Layout and runner of target and draft, and who decided each, on one line."""
        models = [model for model in (self.target, self.draft) if model is not None]
        return "; ".join(_described(model) for model in models)


def decide(inputs: Inputs) -> Decision:
    """Decide one launch. Pure: reads nothing but `inputs`, raises nothing."""
    target, found = _target(inputs)
    draft, of_draft = _draft(inputs, target) if inputs.loads_draft else (None, [])
    parts = [part for part in (target_part(inputs, target), draft_part(inputs, draft)) if part is not None]
    refusals = [*_flag_refusals(inputs), *inputs.unfit, *found]
    if target is not None:
        refusals += _sizes(inputs, parts[0], parts[1:])
    if inputs.speculation.algorithm is not None:
        refusals += _speculation(inputs)
    if draft is not None:
        of_draft += _sizes(inputs, parts[-1], parts[:-1])
    known = {(refusal.code, refusal.what) for refusal in refusals}
    refusals += [_of_draft(refusal) for refusal in of_draft if (refusal.code, refusal.what) not in known]
    models = [model for model in (target, draft) if model is not None]
    environment = fp4.write_back((model.experts for model in models), inputs.draft) if models else {}
    if inputs.wo_a in ("bf16", "mixed") and inputs.flags.wo_a is None:
        environment[envs.FP8_WO_A.name] = "0"
    return Decision(
        target,
        draft,
        tuple(dict.fromkeys(refusals)),
        _declared(target, draft),
        environment,
        tuple(model.experts.note for model in models if model.experts.note),
    )


# --- target and draft -------------------------------------------------------------------------------------------------


def _target(inputs: Inputs) -> tuple[Model | None, list[Refusal]]:
    experts = fp4.decide_experts("target", inputs.target, inputs.flags.experts, inputs.flags.dequant)
    if experts.refusal is not None:
        return None, [experts.refusal]
    layout = _layout(experts, inputs.sizes)
    case = _case(inputs, layout, inputs.runner, inputs.ranks.a2a)
    refusals = [
        *_container(inputs.quant_method, experts),
        *_some(moe_backends.refusal(case)),
        *_some(moe_backends.fusion_refusal(case, inputs.fuse_shared)),
    ]
    verdict = None if _unknown_names(case) else moe_backends.judge(case)
    runner = verdict.runner if verdict else None
    refusals += _without_deepgemm(inputs, case, runner)
    why = "flag" if inputs.runner != "auto" else "this package" if verdict and verdict.by_us else "SGLang's default"
    return Model(experts, layout, inputs.runner, runner, why), refusals


def _draft(inputs: Inputs, target: Model | None) -> tuple[Model | None, list[Refusal]]:
    facts = inputs.draft
    if facts is None:
        return None, []
    experts = fp4.decide_experts("draft", facts, inputs.flags.experts, inputs.flags.dequant)
    if experts.refusal is not None:
        return None, [experts.refusal]
    beside_nvfp4 = target is not None and target.experts.runs == "nvfp4"
    layout = "fp4_hybrid" if beside_nvfp4 and experts.runs == "fp4" else _layout(experts, draft_sizes(inputs))
    a2a = drafts.draft_a2a(inputs.speculation, inputs.ranks.a2a)
    asked, why = _draft_runner(inputs, target, layout, a2a)
    case = _case(inputs, layout, asked, a2a)
    runner = None if _unknown_names(case) else moe_backends.judge(case).runner
    if inputs.speculation.algorithm == "DSPARK" and runner is None and target is not None:
        refusals = [_no_common_runner(inputs, target, experts, layout, a2a)]
    else:
        refusals = _some(moe_backends.refusal(case, flag=DRAFT_RUNNER_FLAG, a2a_flag=DRAFT_A2A_FLAG))
    refusals += [*_container(inputs.draft_quant_method, experts), *_without_deepgemm(inputs, case, runner)]
    return Model(experts, layout, asked, runner, why), refusals


def _no_common_runner(inputs: Inputs, target: Model, experts: ExpertDecision, layout: str, a2a: str) -> Refusal:
    both = [
        runner
        for runner in RUNNERS
        if runner != "auto"
        and _runs(inputs, target.layout, runner, inputs.ranks.a2a)
        and _runs(inputs, layout, runner, a2a)
    ]
    if both:
        remedy = f"Use --moe-runner-backend {' or '.join(both)}."
    elif "fp4" in (experts.runs, target.experts.runs):
        remedy = f"{DEQUANT}, target and draft alike."
    else:
        remedy = "Leave out --speculative-algorithm."
    what = "DSpark runs its draft with the target's MoE runner, which cannot read the draft's experts"
    found = f"{_title(experts)} in the draft, {_title(target.experts)} in the target"
    return Refusal("draft-runner", what, found=found, remedy=remedy)


def _draft_runner(inputs: Inputs, target: Model | None, layout: str, a2a: str) -> tuple[str, str]:
    """The runner to judge the draft by, and who chose it.

    SGLang hands the target's runner down (srt/arg_groups/overrides.py:1649), which may not read the draft's experts.
    Its V4 default for packed FP4 does not reach the draft: there `auto` means Triton on an NVIDIA GPU. Where the draft
    can have a runner of its own (not under DSpark, which ignores the option), we choose one that fits.
    """
    if inputs.speculation.runner is not None and inputs.speculation.algorithm != "DSPARK":
        return inputs.speculation.runner, "flag"
    inherited = _handed_down(inputs, target)
    plain = "triton" if (inherited, a2a, layout) == ("auto", "none", "fp4") and inputs.arch in CUDA else inherited
    if _runs(inputs, layout, plain, a2a) or inputs.speculation.algorithm == "DSPARK":
        return plain, "the target's"
    verdict = moe_backends.judge(_case(inputs, layout, "auto", a2a))
    return (verdict.runner, "this package") if verdict.runner is not None else (plain, "the target's")


def _handed_down(inputs: Inputs, target: Model | None) -> str:
    """What --moe-runner-backend holds after SGLang's resolution of the target."""
    if target is None or inputs.runner != "auto":
        handed = inputs.runner
    else:
        verdict = moe_backends.judge(_case(inputs, target.layout, "auto", inputs.ranks.a2a))
        handed = verdict.runner if verdict.rule.declares and verdict.runner else "auto"
    return drafts.inherited_runner(handed)


def _runs(inputs: Inputs, layout: str, runner: str, a2a: str) -> bool:
    case = _case(inputs, layout, runner, a2a)
    return not _unknown_names(case) and moe_backends.judge(case).ok


def _case(inputs: Inputs, layout: str, runner: str, a2a: str) -> Case:
    ranks = inputs.ranks.resolved()
    ep: Ep = "one" if ranks.ep == 1 else "tp" if ranks.ep == ranks.tp else "part"
    rocm: Rocm = "" if not inputs.flags.aiter else "flydsl" if inputs.flags.flydsl else "aiter"
    on_rocm = inputs.arch.startswith("gfx")
    full_dp = ranks.attn_dp > 1 and ranks.attn_dp == ranks.tp
    return Case(layout, runner, a2a, inputs.arch, ep, rocm if on_rocm else "", full_dp)


def _layout(experts: ExpertDecision, sizes: Sizes) -> str:
    if experts.runs == "fp8" and sizes.block not in (None, (128, 128)):
        return "fp8_odd"
    return experts.runs or "fp8"


def _unknown_names(case: Case) -> bool:
    found = moe_backends.refusal(case)
    return found is not None and found.code == "moe-name"


# --- refusals of single parts -----------------------------------------------------------------------------------------


def _flag_refusals(inputs: Inputs) -> Iterator[Refusal]:
    flags = inputs.flags
    if flags.wo_a and inputs.wo_a in ("bf16", "mixed"):
        found = "attn.wo_a in BF16" if inputs.wo_a == "bf16" else "attn.wo_a in BF16 in some layers"
        remedy = f"Unset {envs.FP8_WO_A.name}, or set it to 0."
        yield Refusal("wo-a-flag", f"{envs.FP8_WO_A.name}=1 needs attn.wo_a in FP8", found=found, remedy=remedy)
    if flags.wo_a_invrope and flags.wo_a is False:
        what = f"{envs.FP8_WO_A_INVROPE.name}=1 contradicts {envs.FP8_WO_A.name}=0"
        yield Refusal("flag-pair", what, remedy="Unset one of them.")


def _without_deepgemm(inputs: Inputs, case: Case, runner: str | None) -> Iterator[Refusal]:
    """DeepGEMM switched off where it is the runner (srt/layers/deep_gemm_wrapper/configurer.py:35)."""
    if runner == "deep_gemm" and not inputs.flags.jit_deepgemm:
        what = f"{envs.JIT_DEEPGEMM.name}=0 switches off the MoE runner that this launch needs, deep_gemm"
        ways = f"Unset {envs.JIT_DEEPGEMM.name} | use --moe-a2a-backend none & use --moe-runner-backend auto"
        yield Refusal("flag-pair", what, remedy=moe_backends.remedy(case, ways))


def _container(method: str | None, experts: ExpertDecision) -> Iterator[Refusal]:
    """The section that SGLang is given has to name the class that it builds these experts with."""
    if experts.runs == "bf16" and method == "fp8":
        found = 'BF16 experts under quant_method "fp8"'
        remedy = "Remove quantization_config from config.json if nothing in the checkpoint is quantised."
        yield Refusal("quant-method", "config.json announces FP8 weights", found=found, remedy=remedy)
    elif experts.runs != "bf16" and method != "fp8":
        given = f'quant_method "{method}"' if method else "no quantization_config"
        what = f"SGLang builds {fp4.TITLES[experts.stored]} experts of DeepSeek-V4 from quant_method fp8 only"
        yield Refusal("quant-method", what, found=given, remedy="Use a checkpoint in the released form.")


def _sizes(inputs: Inputs, part: Part, beside: Sequence[Part]) -> list[Refusal]:
    setting = Setting(inputs.arch, inputs.flags.shared_tp1, inputs.padded)
    return parallel_refusals(part, inputs.ranks, setting, beside=tuple(beside))


def _speculation(inputs: Inputs) -> Iterator[Refusal]:
    spec, ranks = inputs.speculation, inputs.ranks.resolved()
    v41 = inputs.sizes.v41 or draft_sizes(inputs).v41
    yield from drafts.algorithm_refusals(spec, inputs.draft_kind, v41=v41)
    if inputs.serving:
        yield from drafts.dspark_refusals(
            spec,
            arch=inputs.arch,
            pp=ranks.pp,
            attn_dp=ranks.attn_dp,
            attn_cp=ranks.attn_cp,
            a2a=ranks.a2a,
            runner=inputs.runner,
        )
    if drafts.draft_a2a(spec, ranks.a2a) == "deepep_v2":
        what = "deepep_v2 is not validated for drafts"
        yield Refusal("draft-a2a", what, remedy=f"Name another {DRAFT_A2A_FLAG}.")


def _of_draft(found: Refusal) -> Refusal:
    says_so = found.code.startswith("draft") or found.what.startswith("draft")
    return found if says_so else replace(found, what=f"draft: {found.what}")


def _some(found: Refusal | None) -> list[Refusal]:
    return [] if found is None else [found]


# --- what is said and set ---------------------------------------------------------------------------------------------


def _declared(target: Model | None, draft: Model | None) -> dict[str, str]:
    declared = {}
    for model, name in ((target, "moe_runner_backend"), (draft, "speculative_moe_runner_backend")):
        if model is not None and model.runner is not None and model.why == "this package":
            declared[name] = model.runner
    return declared


def _title(experts: ExpertDecision) -> str:
    return fp4.TITLES[experts.runs or experts.stored]


def _described(model: Model) -> str:
    return f"{model.experts.describe()}, MoE runner {model.choice} ({model.why})"
