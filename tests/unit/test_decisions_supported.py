"""The README's table of layouts says what the decisions say."""

import pytest

from sglang_dsv4 import errors
from sglang_dsv4.checkpoint.formats import Format
from sglang_dsv4.decisions.fp4 import ExpertFacts, decide_experts
from sglang_dsv4.decisions.gather import EXPERTS_OF
from sglang_dsv4.decisions.supported import ROWS

LISTED = [(row, form) for row in ROWS for form in row.experts]


def test_every_format_of_experts_is_listed_once():
    assert sorted(form.value for _, form in LISTED) == sorted(
        form.value for form in Format if form is not Format.UNKNOWN
    )


@pytest.mark.parametrize(("row", "form"), LISTED, ids=lambda value: getattr(value, "value", ""))
def test_a_format_is_refused_by_the_rule_of_its_row(row, form):
    decision = decide_experts("target", ExpertFacts(EXPERTS_OF.get(form, "other")), None, None)
    assert (decision.refusal.code if decision.refusal else "") == row.rule


def test_a_rule_is_a_code_or_an_error_class():
    for row in ROWS:
        assert bool(row.loads) != bool(row.rule)
        assert not row.rule.endswith("Error") or hasattr(errors, row.rule)
