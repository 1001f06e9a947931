"""Records that cannot be read: the first one ends a run, or they are left out, counted, and named with their places."""

from dataclasses import dataclass, field
from typing import Literal

Policy = Literal["stop", "skip"]
"""What is done about records that cannot be read."""
SHOWN = 5
"""Records that are named; of all others the number is told."""
REMEDY = "correct it, or leave out all that cannot be read: --bad-records skip counts them and names the first"


@dataclass
class BadRecords:
    """The records of one source that cannot be read. first: messages about the first of them, a line each."""

    policy: Policy = "stop"
    count: int = 0
    first: list[str] = field(default_factory=list)

    def leave_out(self, error: ValueError) -> None:
        """Count a record for the error that names it. Raises the error, with a remedy, unless such ones are skipped."""
        if self.policy == "stop":
            raise ValueError(f"{error}\n  {REMEDY}") from None
        self.count += 1
        if len(self.first) < SHOWN:
            self.first.append(str(error).splitlines()[0])
