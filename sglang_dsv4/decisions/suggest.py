"""The nearest launch that works, when the one that was asked for does not."""

from __future__ import annotations

import functools
import itertools
import math
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from sglang_dsv4 import envs
from sglang_dsv4.decisions.decide import Flags, Inputs, decide
from sglang_dsv4.decisions.drafts import ALGORITHM_OF, Speculation
from sglang_dsv4.decisions.moe_backends import MEGAMOE
from sglang_dsv4.decisions.parallel import MOST_RANKS, Ranks
from sglang_dsv4.decisions.plugins import allowed_plugins, plugins_left_out
from sglang_dsv4.decisions.verdict import Refusal

Fix = Callable[[Inputs], Inputs]

_CONTEXT_AND_DATA = ("attn_cp", "moe_dp", "dcp", "dp")
"""Parallel sizes that are given up together: one of them often asks for another."""

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
    yield 1, lambda given: _flag(given, fuse_wqkv=False)
    yield 1, lambda given: _flag(given, jit_deepgemm=True)
    yield 1, lambda given: _flag(given, shared_tp1=True)
    yield 1, lambda given: _flag(given, aiter=given.arch.startswith("gfx"))
    yield 1, lambda given: _spec(given, runner=None)
    yield 1, lambda given: replace(given, fuse_shared=False)
    yield 1, lambda given: _algorithm(given)
    for divisor in _near_divisors(tp, inputs.ranks.ep):
        yield 1, functools.partial(_ranks, ep=divisor)
    yield 2, lambda given: replace(given, runner="auto")
    yield 2, lambda given: _flag(given, dequant=True)
    yield 2, lambda given: _flag(given, dequant=None)
    yield 3, lambda given: _ranks(given, a2a="none")
    yield 3, lambda given: _spec(given, a2a=None)
    yield 3, lambda given: _ranks(given, attn_dp=2 if tp % 2 == 0 else 1)
    yield 4, lambda given: _ranks(given, attn_dp=4 if tp % 4 == 0 else 1)
    yield 4, lambda given: _ranks(given, **dict.fromkeys(_CONTEXT_AND_DATA, 1))
    yield 4, lambda given: _ranks(given, prefill_cp=False)
    for cost, smaller in enumerate(_smaller(tp), 8):
        yield cost, functools.partial(_on_fewer, tp=smaller)
    yield 8, lambda given: _spec(given, algorithm=None)
    yield 8, lambda given: _ranks(given, pp=1)


def _smaller(tp: int) -> Iterator[int]:
    """The powers of two below a TP size, from the largest that a launch may have; last 1, also for 0 and less."""
    size = MOST_RANKS
    while size > 1:
        if size < tp:
            yield size
        size //= 2
    yield 1


def _near_divisors(tp: int, ep: int) -> list[int]:
    """The EP sizes that a TP size allows, the ones nearest to the one given first."""
    divisors = [size for size in range(1, min(tp, MOST_RANKS) + 1) if tp % size == 0]
    return sorted(divisors, key=lambda size: abs(size - ep))


def _on_fewer(inputs: Inputs, tp: int) -> Inputs:
    """A smaller TP size; EP follows where it spanned the old one, and else keeps what divides the new one."""
    ranks = inputs.ranks
    return _ranks(inputs, tp=tp, ep=tp if ranks.ep == ranks.tp else math.gcd(ranks.ep, tp))


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
    ("fuse_wqkv", envs.FUSE_WQA_WKV),
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


def launch_line(
    inputs: Inputs, model_path: str, *, others: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> str:
    """The shell line that launches `inputs`: flags that differ from their default, then options that do.

    It works in a shell that exports `environ` (this one's by default): what is set there and must not be is unset.
    others: options that no decision is about; they come last.
    """
    environ = os.environ if environ is None else environ
    settings = [*_settings(inputs, environ)]
    unset = [word for name in _in_the_way(inputs, environ) for word in ("-u", name)]
    command = ["python", "-m", "sglang.launch_server", "--model-path", model_path, "--model-impl", "sglang_dsv4"]
    for name, option in _SIZES:
        value = getattr(inputs.ranks, name)
        if value != getattr(Ranks(), name):
            command += [option, str(value)]
    if inputs.ranks.a2a != "none" and inputs.runner != MEGAMOE:
        command += ["--moe-a2a-backend", inputs.ranks.a2a]
    if inputs.runner != "auto":
        command += ["--moe-runner-backend", inputs.runner]
    if inputs.ranks.prefill_cp:
        command.append("--enable-prefill-cp")
    if inputs.fuse_shared:
        command.append("--enforce-shared-experts-fusion")
    words = [*command, *_speculative(inputs.speculation), *others]
    return " ".join([*(["env", *unset] if unset else []), *settings, shlex.join(words)])


def _settings(inputs: Inputs, environ: Mapping[str, str]) -> Iterator[str]:
    """NAME=value for each flag that the launch needs."""
    for name, flag in _ENVIRONMENT:
        value = getattr(inputs.flags, name)
        if value is not None and value != getattr(Flags(), name):
            yield f"{flag.name}={int(value)}"
    platform = platform_of(inputs, environ)
    if inputs.arch == "cpu":
        yield f"{envs.PLATFORM.name}={shlex.quote(platform)}"
    left_out = plugins_left_out(platform, environ)
    if left_out:
        yield f"{envs.PLUGINS.name}={shlex.quote(','.join([*allowed_plugins(environ), *left_out]))}"


def _in_the_way(inputs: Inputs, environ: Mapping[str, str]) -> Iterator[str]:
    """The names in `environ` that would make another launch of it, and that no setting of the line overrides."""
    for name, flag in _ENVIRONMENT:
        wanted = getattr(inputs.flags, name)
        assigned = wanted is not None and wanted != getattr(Flags(), name)
        legacy, current = flag.spellings
        for spelling in (legacy,) if assigned else (legacy, current):
            if spelling in environ and flag.explicit({spelling: environ[spelling]}) not in (None, wanted):
                yield spelling
    if inputs.arch != "cpu" and envs.PLATFORM.get(environ) == envs.CPU_PLATFORM:
        yield from (spelling for spelling in envs.PLATFORM.spellings if spelling in environ)


def platform_of(inputs: Inputs, environ: Mapping[str, str] | None = None) -> str:
    """SGLANG_PLATFORM of the launch: on a CPU the one that `environ` names, else ours."""
    named: str = envs.PLATFORM.get(environ)
    if inputs.arch == "cpu":
        return named or envs.CPU_PLATFORM
    return "" if named == envs.CPU_PLATFORM else named


def _speculative(spec: Speculation) -> list[str]:
    if spec.algorithm is None:
        return []
    options = [text for name, option in _SPECULATION if (value := getattr(spec, name)) for text in (option, value)]
    if spec.algorithm == "EAGLE" and spec.num_steps is not None:
        options += ["--speculative-num-steps", str(spec.num_steps), "--speculative-eagle-topk", str(spec.eagle_topk)]
        options += ["--speculative-num-draft-tokens", str(spec.num_steps + 1)]
    return [*options, "--enable-dp-lm-head"] if spec.dp_lm_head else options
