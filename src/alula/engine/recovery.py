"""Steps that outlive a fault: whatever raises costs speed, or one sequence, or, where that cannot be, the engine."""

from __future__ import annotations

import logging

from alula.engine.engine import Engine
from alula.sequence import StepPlan, TokenEvent

MOST_FAULTS = 3
"""Faults in a row after which a drafter is left out for good, and an engine given up."""
_HARMLESS = ("draft", "tree", "forward", "sample")
"""Stages that change no sequence: their transaction rolls back."""


class EngineDead(RuntimeError):
    """The engine cannot go on: its state may be wrong, or every step fails."""


class SafeSteps:
    """Advances an engine and deals with what a step raises.

    A drafter only guesses, so where it raises the step is repeated without it; after MOST_FAULTS in a row drafting
    stops for good. For any other fault before the commit the sequences of the plan are tried one at a time, and those
    that raise alone fail. EngineDead is raised for a fault in planning or committing, for books of the cache that no
    longer agree, when all of several sequences fail, and after MOST_FAULTS steps in a row that got nowhere.
    """

    def __init__(self, engine: Engine) -> None:
        self.drafting = True
        self.drafter_faults = 0
        self.faults = 0
        self._engine = engine
        self._in_a_row = 0
        self._drafts_in_a_row = 0
        self._log = logging.getLogger("alula.engine")

    def step(self) -> list[TokenEvent]:
        try:
            plan = self._engine.plan()
        except Exception as error:
            raise EngineDead(f"planning a step raised {_name(error)}") from error
        try:
            events = self._engine.run(plan, drafting=self.drafting)
        except Exception as error:  # noqa: BLE001 (whatever a stage raises is dealt with here)
            return self._recover(plan, error)
        self._in_a_row = self._drafts_in_a_row = 0
        return events

    def _recover(self, plan: StepPlan, error: Exception) -> list[TokenEvent]:
        stage = self._engine.times.current
        self._log.error("stage %s of a step raised: %s", stage, error, exc_info=error)
        if stage not in _HARMLESS:
            raise EngineDead(f"stage {stage} of a step raised {_name(error)}") from error
        self._engine.cache.check_integrity()
        if stage == "draft":
            return self._without_drafter(plan)
        return self._one_by_one(plan)

    def _without_drafter(self, plan: StepPlan) -> list[TokenEvent]:
        self.drafter_faults += 1
        self._drafts_in_a_row += 1
        if self._drafts_in_a_row >= MOST_FAULTS:
            self.drafting = False
            self._log.error("the drafter failed %d steps in a row: decoding goes on without it", MOST_FAULTS)
        try:
            return self._engine.run(plan, drafting=False)
        except Exception as error:
            if self._engine.times.current not in _HARMLESS:
                raise EngineDead(f"a step without its drafter raised {_name(error)}") from error
            return self._one_by_one(plan)

    def _one_by_one(self, plan: StepPlan) -> list[TokenEvent]:
        self.faults += 1
        events, failed = [], 0
        for item in plan.items:
            try:
                events += self._engine.run(StepPlan((item,)), drafting=False)
            except Exception as error:
                if self._engine.times.current not in _HARMLESS:
                    raise EngineDead(f"a single sequence's step raised {_name(error)}") from error
                self._log.error("sequence %d fails: %s", item.sequence.id, error)
                events.append(
                    self._engine.fail(item.sequence.id, f"the engine failed on this request ({_name(error)})")
                )
                failed += 1
        self._give_up_on(failed, len(plan.items))
        return events

    def _give_up_on(self, failed: int, tried: int) -> None:
        self._in_a_row = self._in_a_row + 1 if failed == tried else 0
        if self._in_a_row >= MOST_FAULTS or failed == tried > 1:
            raise EngineDead(f"all of {tried} sequences fail, {self._in_a_row} steps in a row")


def _name(error: BaseException) -> str:
    return type(error).__name__
