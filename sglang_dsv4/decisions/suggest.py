"""The nearest launch that works, when the one that was asked for does not."""

from __future__ import annotations

import functools
import itertools
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace

from sglang_dsv4 import envs
from sglang_dsv4.decisions.decide import Flags, Inputs, decide
from sglang_dsv4.decisions.drafts import ALGORITHM_OF, Speculation
from sglang_dsv4.decisions.parallel import MOST_RANKS, Ranks
from sglang_dsv4.decisions.verdict import Refusal

Fix = Callable[[Inputs], Inputs]

_CONTEXT_AND_DATA = ("attn_cp", "moe_dp", "dcp", "dp")

MOST_STEPS = 6
REMAINING = 8


def nearest(inputs: Inputs) -> Inputs | None:
    """Inputs that `decide` accepts, reached by curing one refusal after the other; None when one has no cure.

    Each cure is the one or two changes that give up least. Losing a rank or the draft weighs more than losing a kernel.
    """
    for _ in range(MOST_STEPS):
        refusals = decide(inputs).refusals
        if not refusals:
            return inputs
        cured = _cure(inputs, refusals[0])
        if cured is None:
            return None
        inputs = cured
    return None


def _cure(inputs: Inputs, refusal: Refusal) -> Inputs | None:
    """The cheapest change after which this kind of refusal is gone; each one that is left then adds to the price."""
    fixes = [(cost, fix) for cost, fix in _fixes(inputs) if fix(inputs) != inputs]
    groups = [group for count in (1, 2) for group in itertools.combinations(fixes, count)]
    best: tuple[int, Inputs] | None = None
    for group in sorted(groups, key=lambda group: sum(cost for cost, _ in group)):
        cost = sum(cost for cost, _ in group)
        if best is not None and cost >= best[0]:
            break
        changed = inputs
        for _, fix in group:
            changed = fix(changed)
        left = decide(changed).refusals
        price = cost + REMAINING * len(left)
        if all(other.code != refusal.code for other in left) and (best is None or price < best[0]):
            best = (price, changed)
    return best[1] if best else None


def _fixes(inputs: Inputs) -> Iterator[tuple[int, Fix]]:
    """Single changes, each with what it gives up."""
    tp = inputs.ranks.tp
    yield 1, lambda given: _flag(given, experts=None)
    yield 1, lambda given: _flag(given, wo_a=None, wo_a_invrope=None)
    yield 1, lambda given: _flag(given, jit_deepgemm=True)
    yield 1, lambda given: _flag(given, shared_tp1=True)
    yield 1, lambda given: _flag(given, aiter=given.arch.startswith("gfx"))
    yield 1, lambda given: _spec(given, runner=None)
    yield 1, lambda given: replace(given, fuse_shared=False)
    yield 1, lambda given: _algorithm(given)
    yield 1, lambda given: _ranks(given, ep=1)
    yield 1, lambda given: _ranks(given, ep=tp)
    yield 2, lambda given: replace(given, runner="auto")
    yield 2, lambda given: _flag(given, dequant=True)
    yield 2, lambda given: _flag(given, dequant=None)
    yield 3, lambda given: _ranks(given, a2a="none")
    yield 3, lambda given: _spec(given, a2a=None)
    yield 3, lambda given: _ranks(given, attn_dp=2 if tp % 2 == 0 else 1)
    yield 4, lambda given: _ranks(given, attn_dp=4 if tp % 4 == 0 else 1)
    yield 4, lambda given: _ranks(given, **dict.fromkeys(_CONTEXT_AND_DATA, 1))
    for cost, smaller in enumerate(_smaller(tp), 8):
        yield cost, functools.partial(_ranks, tp=smaller)
    yield 8, lambda given: _spec(given, algorithm=None)
    yield 8, lambda given: _ranks(given, pp=1)


def _smaller(tp: int) -> Iterator[int]:
    """The powers of two below a TP size, from the largest that a launch may have; 1 in place of what is no size."""
    size = MOST_RANKS
    while size > 1:
        if size < tp:
            yield size
        size //= 2
    yield 1


def _algorithm(inputs: Inputs) -> Inputs:
    fitting = ALGORITHM_OF.get(inputs.draft_kind)
    if fitting is None or inputs.speculation.algorithm is None:
        return inputs
    return _spec(inputs, algorithm=fitting, eagle_topk=1, num_steps=inputs.speculation.num_steps or 1)


def _flag(inputs: Inputs, **changes: object) -> Inputs:
    return replace(inputs, flags=replace(inputs.flags, **changes))  # type: ignore[arg-type]


def _spec(inputs: Inputs, **changes: object) -> Inputs:
    return replace(inputs, speculation=replace(inputs.speculation, **changes))  # type: ignore[arg-type]


def _ranks(inputs: Inputs, **changes: object) -> Inputs:
    return replace(inputs, ranks=replace(inputs.ranks, **changes))  # type: ignore[arg-type]


# --- as a command line ------------------------------------------------------------------------------------------------

_ENVIRONMENT: tuple[tuple[str, envs.Flag], ...] = (
    ("experts", envs.FP4_EXPERTS),
    ("dequant", envs.FP4_DEQUANT),
    ("wo_a", envs.FP8_WO_A),
    ("wo_a_invrope", envs.FP8_WO_A_INVROPE),
    ("shared_tp1", envs.SHARED_EXPERT_TP1),
    ("jit_deepgemm", envs.JIT_DEEPGEMM),
    ("aiter", envs.USE_AITER),
    ("flydsl", envs.FLYDSL_MEGA_MOE),
)
_SIZES = (
    ("tp", "--tp-size"),
    ("ep", "--ep-size"),
    ("pp", "--pp-size"),
    ("dp", "--dp-size"),
    ("attn_dp", "--attn-dp-size"),
    ("attn_cp", "--attn-cp-size"),
    ("moe_dp", "--moe-dp-size"),
    ("dcp", "--dcp-size"),
)
_SPECULATION = (
    ("algorithm", "--speculative-algorithm"),
    ("draft_path", "--speculative-draft-model-path"),
    ("runner", "--speculative-moe-runner-backend"),
    ("a2a", "--speculative-moe-a2a-backend"),
)


def launch_line(inputs: Inputs, model_path: str) -> str:
    """The shell line that launches `inputs`: flags that differ from their default, then options that do."""
    variables = [
        f"{flag.name}={int(value)}"
        for name, flag in _ENVIRONMENT
        if (value := getattr(inputs.flags, name)) is not None and value != getattr(Flags(), name)
    ]
    command = ["python", "-m", "sglang.launch_server", "--model-path", model_path, "--model-impl", "sglang_dsv4"]
    for name, option in _SIZES:
        value = getattr(inputs.ranks, name)
        if value != getattr(Ranks(), name):
            command += [option, str(value)]
    if inputs.ranks.a2a != "none":
        command += ["--moe-a2a-backend", inputs.ranks.a2a]
    if inputs.runner != "auto":
        command += ["--moe-runner-backend", inputs.runner]
    if inputs.fuse_shared:
        command.append("--enforce-shared-experts-fusion")
    return " ".join([*variables, shlex.join([*command, *_speculative(inputs.speculation)])])


def _speculative(spec: Speculation) -> list[str]:
    if spec.algorithm is None:
        return []
    options = [text for name, option in _SPECULATION if (value := getattr(spec, name)) for text in (option, value)]
    if spec.algorithm == "EAGLE" and spec.num_steps is not None:
        options += ["--speculative-num-steps", str(spec.num_steps), "--speculative-eagle-topk", str(spec.eagle_topk)]
        options += ["--speculative-num-draft-tokens", str(spec.num_steps + 1)]
    return [*options, "--enable-dp-lm-head"] if spec.dp_lm_head else options
