"""What a decision says when the answer is no: one refusal per reason, raised together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_dsv4.errors import RefusedError


@dataclass(frozen=True)
class Refusal:
    """One reason why a launch cannot work, in the parts of every message of this package.

    code      stable short name of the rule, for tests and `--json`
    what      the flag, tensor or size at fault
    found, expected, remedy   as in errors.Dsv4Error
    """

    code: str
    what: str
    found: str = ""
    expected: str = ""
    remedy: str = ""

    def error(self) -> RefusedError:
        """The refusal as an exception, not raised."""
        return RefusedError(self.what, found=self.found, expected=self.expected, remedy=self.remedy)

    def __str__(self) -> str:
        return self.error().headline()


def raise_all(refusals: Sequence[Refusal]) -> None:
    """Raise RefusedError for all refusals together; do nothing when there is none."""
    if len(refusals) == 1:
        raise refusals[0].error()
    if refusals:
        raise RefusedError(
            f"this launch cannot work, for {len(refusals)} reasons",
            remedy="Change what each line names.",
            details=[str(refusal) for refusal in refusals],
        )
