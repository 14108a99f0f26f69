"""A step under way, as one rank sees it."""

from __future__ import annotations

from dataclasses import dataclass

from rhymerl.distributed import Line
from rhymerl.rollout.ahead import Ahead, fingerprint
from rhymerl.rollout.conductor import Conductor
from rhymerl.rollout.part import Part
from rhymerl.rollout.plans import SharedPlan, take_up
from rhymerl.types import RolloutRequest


@dataclass(slots=True, kw_only=True)
class Work:
    """Its requests, this rank's part of them, and the line to the other ranks."""

    step: int | str
    requests: list[RolloutRequest]
    following: list[RolloutRequest] | None
    takes_ahead: bool  # what was drawn ahead is for this step
    part: Part
    conductor: Conductor
    line: Line
    following_plan: SharedPlan | None = None

    def exchange(self, *, rank: int) -> bool:
        """With the other ranks; returns whether all are done."""
        part = self.part
        news = self.line.exchange(part.report(), part.parcels(), self.conductor.decide, waits=not part.is_busy)
        part.receive(news.parcels)
        for orders in news.orders:
            part.give_away(orders.moves)
            if orders.plan is not None and self.following is not None:
                self.following_plan = orders.plan
                part.run_ahead(take_up(orders.plan, self.following, rank=rank)[rank])
        return any(orders.is_done for orders in news.orders)

    def ahead(self) -> Ahead | None:
        """What this rank has of the following step, once all are done with this one; None without a plan for it."""
        drawn = self.part.pause()
        if self.following is None or self.following_plan is None:
            return None
        asked = fingerprint(self.following)
        return Ahead(step=int(self.step) + 1, asked=asked, plan=self.following_plan, drawn=drawn)
