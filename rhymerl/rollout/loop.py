"""The rollout loop: prompts in, scored samples out. It knows no variant of anything, only the bases."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from rhymerl.backends.base import RolloutBackend
from rhymerl.distributed import Alone, Ranks
from rhymerl.errors import BackendError, ConfigError, RunError
from rhymerl.history import HistoryStore
from rhymerl.history.answers import answers_of
from rhymerl.hooks import Hooks
from rhymerl.progress import SILENT, ProgressBar
from rhymerl.rewards import RewardScorer
from rhymerl.rewards.failures import Failures
from rhymerl.rollout.ahead import Ahead, Drawn, fingerprint, united
from rhymerl.rollout.base import Rollout, RolloutSettings, requests_of
from rhymerl.rollout.conductor import Conductor
from rhymerl.rollout.groups import groups_that_teach_nothing, replaced
from rhymerl.rollout.metrics import rollout_metrics, staleness_metrics
from rhymerl.rollout.modes import RunAhead, check_run_ahead
from rhymerl.rollout.part import Pace, Part
from rhymerl.rollout.plans import SharedPlan, make_plan, take_up
from rhymerl.rollout.rounds import Answered, Round, Share, metrics_of
from rhymerl.rollout.work import Work
from rhymerl.schedulers.base import Scheduler
from rhymerl.types import Completion, Prompt, RolloutRequest, Sample, Split

if TYPE_CHECKING:
    from torch import Tensor

    from rhymerl.types import IntArray

Decode = Callable[["IntArray"], str]

_SLICE_S = 0.02  # between two exchanges with the other ranks
_REBALANCE_S = 0.5
_PASSES = 16  # the same in lockstep, where time is counted in exchanges
_REBALANCE_EXCHANGES = 4


class RolloutLoop:
    """Asks backends for answers, scores them as they finish, and lets history, scheduler and drafters learn.

    Every rank has a loop over a backend of its own, which has been started, and they run the same steps together; each gets the
    whole step's samples. `run_ahead` as `check_run_ahead` says; with `lockstep` nothing follows the clock, so that a run over
    several ranks repeats bit for bit. Raises ConfigError for settings that contradict one another.
    """

    def __init__(
        self,
        backend: RolloutBackend,
        scheduler: Scheduler,
        *,
        scorer: RewardScorer,
        decode: Decode,
        history: HistoryStore | None = None,
        stop_token_ids: Sequence[int] = (),
        seed: int = 0,
        device: Any = None,
        ranks: Ranks | None = None,
        run_ahead: RunAhead = "off",
        max_staleness: int = 1,
        lockstep: bool = False,
        progress: ProgressBar = SILENT,
    ) -> None:
        check_run_ahead(run_ahead, max_staleness)
        self.backend = backend
        self.scheduler = scheduler
        self.scorer = scorer
        self.decode = decode
        self.stop_token_ids = tuple(stop_token_ids)
        self.seed = seed
        self.device = device
        self.progress = progress  # hears of each answer of this rank's
        self.ranks = ranks if ranks is not None else Alone()
        self.run_ahead = run_ahead
        self.history = history if history is not None else HistoryStore()
        self.ahead: Ahead | None = None  # drawn for the next step to come
        self.policy_version = 0
        follows_clock = scheduler.moves_requests or run_ahead != "off"
        self._lockstep = lockstep and self.ranks.size > 1 and follows_clock
        if self._lockstep and not backend.counts_passes:
            raise ConfigError(
                f"deterministic=true with {self.ranks.size} ranks and run_ahead={run_ahead}, "
                f"scheduler={type(scheduler).__name__}: {type(backend).__name__} cannot count passes, by which ranks keep step; expected "
                "run_ahead=off with a scheduler that moves nothing, such as fifo, or backend=embedded"
            )
        self.backend.follow(self.history)

    def run(
        self,
        prompts: Sequence[Prompt],
        step: int | str,
        settings: RolloutSettings,
        *,
        epoch: int = 0,
        split: Split = "train",
        following: Sequence[Prompt] | None = None,
        replacements: Iterator[Prompt] | None = None,
    ) -> Rollout:
        """`group_size` scored answers a prompt. `step` keys the noise, `epoch` and `split` say where in the history they go.

        Drafter and scheduler learn from the split `train` only; the history of the other serves its own drafts. `following` are
        the next step's prompts, for workers that run ahead; without them none does. `replacements` are other prompts, for groups that
        teach nothing (`settings.dynamic_sampling`). Called on all ranks, with the same arguments.
        """
        requests = self._requests(prompts, step, settings, split)
        rounds = [self._round(requests, step, split, self._following(following, step, settings))]
        samples = rounds[0].samples
        for number in range(1, settings.dynamic_sampling + 1 if replacements is not None else 1):
            dull = groups_that_teach_nothing(samples)
            fresh = list(itertools.islice(replacements or (), len(dull)))
            if not fresh:
                break
            rounds.append(self._round(self._requests(fresh, step, settings, split, number), step, split, None))
            samples = replaced(samples, dull, rounds[-1].samples)
        if split == "train":
            self.backend.rest()
        metrics = {
            **rollout_metrics(samples),
            **metrics_of(rounds),
            **staleness_metrics(samples, self.policy_version),
            **self._learn(rounds, epoch, split),
        }
        failures = sum((share.failures for each in rounds for share in each.shares), Failures())
        return Rollout(samples=samples, metrics=metrics, failures=failures)

    def _round(
        self,
        requests: list[RolloutRequest],
        step: int | str,
        split: Split,
        following: list[RolloutRequest] | None,
    ) -> Round:
        """All answers to these requests, on every rank."""
        started = time.perf_counter()
        work = self._open(requests, step, following, split)
        answers = self._answer(work)
        if following is not None or work.takes_ahead:
            self.ahead = work.ahead()
        rollout_s = time.perf_counter() - started
        shares = self.ranks.gather(self._share(work, answers, rollout_s))
        work.line.close()
        samples = self._samples(requests, [each for share in shares for each in share.answered])
        age = self.policy_version - min(
            int(s.completion.generated.policy_versions.min(initial=self.policy_version)) for s in samples
        )
        if age > (self.run_ahead == "keep"):
            raise RunError(f"step {step}: a token was drawn {age} updates ago")
        scored_s = time.perf_counter() - started - rollout_s
        return Round(samples=samples, shares=shares, num_moves=work.conductor.num_moves, scored_s=scored_s)

    def sync_weights(self, named_tensors: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """The policy of the steps to come."""
        self.policy_version = policy_version
        self.backend.sync_weights(named_tensors, policy_version)

    # -- the beginning of a step ---------------------------------------------------------------------------------

    def _requests(
        self,
        prompts: Sequence[Prompt],
        step: int | str,
        settings: RolloutSettings,
        split: Split = "train",
        round_number: int = 0,
    ) -> list[RolloutRequest]:
        return requests_of(
            prompts,
            step,
            settings,
            seed=self.seed,
            stop_token_ids=self.stop_token_ids,
            split=split,
            round_number=round_number,
        )

    def _following(
        self, prompts: Sequence[Prompt] | None, step: int | str, settings: RolloutSettings
    ) -> list[RolloutRequest] | None:
        if prompts is None or self.run_ahead == "off" or not isinstance(step, int):
            return None
        return self._requests(prompts, step + 1, settings)

    def _open(
        self,
        requests: list[RolloutRequest],
        step: int | str,
        following: list[RolloutRequest] | None,
        split: Split,
    ) -> Work:
        taken = self.ahead if split == "train" and self.ahead is not None and self.ahead.step == step else None
        # It may be of before a resume with other settings.
        ahead = taken if taken is not None and taken.asked == fingerprint(requests) else None
        drawn = ahead.drawn if ahead is not None else {}
        plan = ahead.plan if ahead is not None and len(ahead.plan.queues) == self.ranks.size else None
        plan = plan or self._plan(requests, step)
        queue = take_up(plan, requests, rank=self.ranks.rank)[self.ranks.rank]
        if self.run_ahead == "draft":
            queue = [_with_draft(request, drawn.get(request.id)) for request in queue]
        drawn = drawn if self.run_ahead == "keep" else {}
        return Work(
            step=step,
            requests=requests,
            following=following,
            takes_ahead=taken is not None,
            part=Part(self.backend, queue, requests=requests, drawn=drawn, pace=self._pace),
            conductor=Conductor(
                self.scheduler,
                requests,
                plan,
                step=step if isinstance(step, int) and split == "train" else None,
                following=following,
                every=_REBALANCE_EXCHANGES if self._lockstep else _REBALANCE_S,
                clock=None if self._lockstep else time.monotonic,
            ),
            line=self.ranks.line(lockstep=self._lockstep),
        )

    def _plan(self, requests: list[RolloutRequest], step: int | str) -> SharedPlan:
        workers, is_first = self.ranks.size, self.ranks.rank == 0
        plan = make_plan(self.scheduler, requests, num_workers=workers, step=step) if is_first else None
        return cast(SharedPlan, self.ranks.broadcast(plan))

    @property
    def _pace(self) -> Pace:
        if self._lockstep:
            return Pace(max_passes=_PASSES, report_every_s=0.0 if self.scheduler.listens else None)
        every_s = _REBALANCE_S if self.scheduler.listens else None
        return Pace(timeout_s=_SLICE_S if self.ranks.size > 1 else None, report_every_s=every_s)

    # -- its answers ---------------------------------------------------------------------------------------------

    def _answer(self, work: Work) -> dict[str, tuple[Completion, str]]:
        """Until all ranks are done: this one's completions and their texts by request id; each is scored the moment it is done."""
        answers: dict[str, tuple[Completion, str]] = {}
        is_done = False
        while not is_done:
            for completion in work.part.decode():
                answers[completion.request.id] = completion, self._score(completion)
            is_done = work.exchange(rank=self.ranks.rank)
        return answers

    def _score(self, completion: Completion) -> str:
        request = completion.request
        text = self.decode(completion.token_ids)
        self.scorer.submit(request.id, text, request.prompt.columns)
        self.progress.advance()
        return text

    def _share(self, work: Work, answers: Mapping[str, tuple[Completion, str]], rollout_s: float) -> Share:
        order = [(place, request.id) for place, request in enumerate(work.requests) if request.id in answers]
        scores = self.scorer.collect(device=self.device, order=[name for _, name in order])
        return Share(
            answered=[
                Answered(place=place, drawn=Drawn.of(answers[name][0]), text=answers[name][1], rewards=scores[name])
                for place, name in order
            ],
            metrics={**self.backend.metrics(), **self.scorer.metrics()},
            busy_s=work.part.busy_s,
            rollout_s=rollout_s,
            failures=self.scorer.failures(),
        )

    def _samples(self, requests: Sequence[RolloutRequest], answered: Sequence[Answered]) -> list[Sample]:
        """In canonical order. Raises BackendError unless each request has exactly one answer."""
        if sorted(each.place for each in answered) != list(range(len(requests))):
            raise BackendError(f"{len(answered)} answers to {len(requests)} requests: some were lost or came twice")
        return [self._sample(requests[each.place], each) for each in sorted(answered, key=lambda each: each.place)]

    def _sample(self, request: RolloutRequest, answered: Answered) -> Sample:
        rewards = answered.rewards
        return Sample(
            completion=answered.drawn.completion(request),
            text=answered.text,
            reward=sum(reward.weight * rewards[reward.name] for reward in self.scorer.rewards),
            rewards=rewards,
            loss_mask=np.ones(len(answered.drawn.generated), np.bool_),
        )

    # -- its end -------------------------------------------------------------------------------------------------

    def _learn(self, rounds: Sequence[Round], epoch: int, split: Split) -> dict[str, float]:
        """Drafter, scheduler and history, from replaced groups too; returns what they and the conductor have to say."""
        samples = [sample for each in rounds for sample in each.samples]
        metrics = {"sched/migration_rate": sum(each.num_moves for each in rounds) / len(samples)}
        if split == "train":
            self.backend.learn(samples)
            if self.ranks.rank == 0:
                with Hooks("scheduler", self.scheduler):
                    self.scheduler.learn(samples)
                    metrics |= self.scheduler.metrics()
        for prompt, answers in answers_of(samples, epoch):
            # A prompt may have been in another step of the epoch, in the place of another.
            known = sum(answer.epoch == epoch for answer in self.history.answers(prompt, split))
            self.history.add(prompt, [replace(each, sample=each.sample + known) for each in answers], split)
        self.backend.follow(self.history)
        sizes = {"history/tokens": float(self.history.num_tokens), "history/bytes": float(self.history.bytes)}
        return {**self.ranks.broadcast(metrics), **sizes}

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What all ranks have drawn for the next step. Called on all of them."""
        ahead = united(self.ranks.gather(self.ahead))
        return {"ahead": ahead.state_dict() if ahead is not None else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` returned, on as many ranks as there were or on others."""
        self.ahead = Ahead.of_state(state["ahead"]) if state["ahead"] is not None else None


def _with_draft(request: RolloutRequest, drawn: Drawn | None) -> RolloutRequest:
    return replace(request, ahead=drawn.generated.token_ids) if drawn is not None else request
