"""The rollout loop: prompts in, scored samples out. It knows no variant of anything, only the bases."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from rhymerl.backends.base import RolloutBackend
from rhymerl.distributed import Alone, Channel, Ranks
from rhymerl.errors import BackendError, RunError
from rhymerl.history import HistoryStore
from rhymerl.history.answers import answers_of
from rhymerl.hooks import Hooks
from rhymerl.progress import SILENT, ProgressBar
from rhymerl.rewards import RewardScorer
from rhymerl.rewards.failures import Failures
from rhymerl.rollout.base import Rollout, RolloutSettings, RunAhead, check_run_ahead, follows_clock, requests_of
from rhymerl.rollout.coordinator import Coordinator, SharedPlan, make_plan, wants_progress
from rhymerl.rollout.metrics import metrics_of, rollout_metrics, staleness_metrics
from rhymerl.rollout.results import RankResult, SamplingRound, ScoredOutput, groups_that_teach_nothing, replaced
from rhymerl.rollout.run_ahead import RunAheadState, fingerprint, united
from rhymerl.rollout.worker import DecodeLimits, Worker
from rhymerl.schedulers.base import Scheduler
from rhymerl.types import Completion, Output, Prompt, RolloutRequest, Sample, Split

if TYPE_CHECKING:
    from torch import Tensor

    from rhymerl.types import IntArray

Decode = Callable[["IntArray"], str]

_SLICE_S = 0.02  # between two exchanges with the other ranks
_REBALANCE_S = 0.5
_PASSES = 16  # the same in lockstep, where time is counted in exchanges
_REBALANCE_EXCHANGES = 4


@dataclass(slots=True, kw_only=True)
class StepInProgress:
    """A step as one rank sees it: its requests, this rank's worker, and the channel to the others."""

    step: int | str
    requests: list[RolloutRequest]
    following: list[RolloutRequest] | None
    resumes: bool  # run-ahead state is for this step
    worker: Worker
    coordinator: Coordinator
    channel: Channel
    following_plan: SharedPlan | None = None

    def exchange(self, *, rank: int) -> bool:
        """Tell the other ranks what is new, and follow what they say; returns whether all are done."""
        worker = self.worker
        received = self.channel.exchange(
            worker.report(), worker.messages(), self.coordinator.decide, waits=not worker.is_busy
        )
        worker.receive(received.messages)
        for command in received.commands:
            worker.give_back(command.moves)
            if command.plan is not None and self.following is not None:
                self.following_plan = command.plan
                worker.run_ahead(command.plan.queue(self.following, worker=rank))
        return any(command.is_done for command in received.commands)

    def run_ahead_state(self) -> RunAheadState | None:
        """Return what this rank has of the following step, once all are done with this one; None without a plan for it."""
        outputs = self.worker.pause()
        if self.following is None or self.following_plan is None:
            return None
        asked = fingerprint(self.following)
        return RunAheadState(step=int(self.step) + 1, asked=asked, plan=self.following_plan, outputs=outputs)


class RolloutLoop:
    """Asks backends for answers, scores them as they finish, and lets history, scheduler and drafters learn.

    Every rank has a loop over a backend of its own, which has been started, and they run the same steps together; each gets the
    whole step's samples. `run_ahead` as `check_run_ahead` says; with `lockstep` nothing follows the clock, so that a run over
    several ranks repeats bit for bit. Raises ValueError for arguments that contradict one another.
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
        self.worker = Worker(backend)
        self.scheduler = scheduler
        self.scorer = scorer
        self.decode = decode
        self.stop_token_ids = tuple(stop_token_ids)
        self.seed = seed
        self.device = device
        self.progress = progress  # hears of each answer of this rank
        self.ranks = ranks if ranks is not None else Alone()
        self.run_ahead = run_ahead
        self.history = history if history is not None else HistoryStore()
        self.run_ahead_state: RunAheadState | None = None  # for the next step to come
        self.policy_version = 0
        self._lockstep = lockstep and self.ranks.size > 1 and follows_clock(scheduler, run_ahead)
        if self._lockstep and not self.worker.counts_passes:
            raise ValueError(
                f"lockstep=True: {self.worker.name} cannot count passes, by which {self.ranks.size} ranks keep step; expected a "
                "backend that does, or run_ahead=off with a scheduler that moves nothing"
            )
        self.worker.follow(self.history)

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
            useless = groups_that_teach_nothing(samples)
            fresh = list(itertools.islice(replacements or (), len(useless)))
            if not fresh:
                break
            rounds.append(self._round(self._requests(fresh, step, settings, split, number), step, split, None))
            samples = replaced(samples, useless, rounds[-1].samples)
        if split == "train":
            self.worker.sleep()
        metrics = {
            **rollout_metrics(samples),
            **metrics_of(rounds),
            **staleness_metrics(samples, self.policy_version),
            **self._learn(rounds, epoch, split),
        }
        failures = sum((result.failures for each in rounds for result in each.by_rank), Failures())
        return Rollout(samples=samples, metrics=metrics, failures=failures)

    def _round(
        self,
        requests: list[RolloutRequest],
        step: int | str,
        split: Split,
        following: list[RolloutRequest] | None,
    ) -> SamplingRound:
        """Return all answers to these requests, on every rank."""
        started = time.perf_counter()
        current = self._begin(requests, step, following, split)
        answers = self._answer(current)
        if following is not None or current.resumes:
            self.run_ahead_state = current.run_ahead_state()
        rollout_s = time.perf_counter() - started
        results = self.ranks.gather(self._result(current, answers, rollout_s))
        current.channel.close()
        samples = self._samples(requests, [each for result in results for each in result.scored])
        age = self.policy_version - min(
            int(s.completion.output.policy_versions.min(initial=self.policy_version)) for s in samples
        )
        if age > (self.run_ahead == "keep"):
            raise RunError(f"step {step}: a token was sampled {age} updates ago")
        scored_s = time.perf_counter() - started - rollout_s
        return SamplingRound(
            samples=samples, by_rank=results, num_moves=current.coordinator.num_moves, scored_s=scored_s
        )

    def sync_weights(self, named_tensors: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """Hand over the policy of the steps to come."""
        self.policy_version = policy_version
        self.worker.sync_weights(named_tensors, policy_version)

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

    def _begin(
        self,
        requests: list[RolloutRequest],
        step: int | str,
        following: list[RolloutRequest] | None,
        split: Split,
    ) -> StepInProgress:
        found = self.run_ahead_state if split == "train" else None
        taken = found if found is not None and found.step == step else None
        # It may be of before a resume with other settings.
        state = taken if taken is not None and taken.asked == fingerprint(requests) else None
        outputs = state.outputs if state is not None else {}
        plan = state.plan if state is not None and len(state.plan.queues) == self.ranks.size else None
        plan = plan if plan is not None else self._plan(requests, step)
        queue = plan.queue(requests, worker=self.ranks.rank)
        if self.run_ahead == "draft":
            queue = [_with_draft(request, outputs.get(request.id)) for request in queue]
        outputs = outputs if self.run_ahead == "keep" else {}
        self.worker.begin_step(queue, requests=requests, outputs=outputs, limits=self._limits)
        return StepInProgress(
            step=step,
            requests=requests,
            following=following,
            resumes=taken is not None,
            worker=self.worker,
            coordinator=Coordinator(
                self.scheduler,
                requests,
                plan,
                step=step if isinstance(step, int) and split == "train" else None,
                following=following,
                keeps=self.run_ahead == "keep",
                every=_REBALANCE_EXCHANGES if self._lockstep else _REBALANCE_S,
                clock=None if self._lockstep else time.monotonic,
            ),
            channel=self.ranks.channel(lockstep=self._lockstep),
        )

    def _plan(self, requests: list[RolloutRequest], step: int | str) -> SharedPlan:
        workers, is_first = self.ranks.size, self.ranks.rank == 0
        plan = make_plan(self.scheduler, requests, num_workers=workers, step=step) if is_first else None
        return cast(SharedPlan, self.ranks.broadcast(plan))

    @property
    def _limits(self) -> DecodeLimits:
        reports = wants_progress(self.scheduler)
        if self._lockstep:
            return DecodeLimits(max_passes=_PASSES, report_every_s=0.0 if reports else None)
        every_s = _REBALANCE_S if reports else None
        return DecodeLimits(timeout_s=_SLICE_S if self.ranks.size > 1 else None, report_every_s=every_s)

    # -- its answers ---------------------------------------------------------------------------------------------

    def _answer(self, current: StepInProgress) -> dict[str, tuple[Completion, str]]:
        """Decode until all ranks are done; returns this one's completions and their texts by request id.

        Each is scored the moment it is done.
        """
        answers: dict[str, tuple[Completion, str]] = {}
        is_done = False
        while not is_done:
            for completion in current.worker.decode():
                answers[completion.request.id] = completion, self._score(completion)
            is_done = current.exchange(rank=self.ranks.rank)
        return answers

    def _score(self, completion: Completion) -> str:
        request = completion.request
        text = self.decode(completion.token_ids)
        self.scorer.submit(request.id, text, request.prompt.columns)
        self.progress.advance()
        return text

    def _result(
        self, current: StepInProgress, answers: Mapping[str, tuple[Completion, str]], rollout_s: float
    ) -> RankResult:
        order = [(index, request.id) for index, request in enumerate(current.requests) if request.id in answers]
        scores = self.scorer.collect(device=self.device, order=[name for _, name in order])
        return RankResult(
            scored=[
                ScoredOutput(index=index, output=answers[name][0].output, text=answers[name][1], rewards=scores[name])
                for index, name in order
            ],
            metrics={**self.worker.metrics(), **self.scorer.metrics()},
            busy_s=current.worker.busy_s,
            rollout_s=rollout_s,
            failures=self.scorer.failures(),
        )

    def _samples(self, requests: Sequence[RolloutRequest], scored: Sequence[ScoredOutput]) -> list[Sample]:
        """Return the samples in canonical order. Raises BackendError unless each request has exactly one answer."""
        if sorted(each.index for each in scored) != list(range(len(requests))):
            raise BackendError(f"{len(scored)} answers to {len(requests)} requests: some were lost or came twice")
        return [self._sample(requests[each.index], each) for each in sorted(scored, key=lambda each: each.index)]

    def _sample(self, request: RolloutRequest, scored: ScoredOutput) -> Sample:
        rewards = scored.rewards
        return Sample(
            completion=Completion(request=request, output=scored.output),
            text=scored.text,
            reward=sum(reward.weight * rewards[reward.name] for reward in self.scorer.rewards),
            rewards=rewards,
            loss_mask=np.ones(len(scored.output), np.bool_),
        )

    # -- its end -------------------------------------------------------------------------------------------------

    def _learn(self, rounds: Sequence[SamplingRound], epoch: int, split: Split) -> dict[str, float]:
        """Drafter, scheduler and history, from replaced groups too; returns what they and the coordinator have to say."""
        samples = [sample for each in rounds for sample in each.samples]
        metrics = {"sched/migration_rate": sum(each.num_moves for each in rounds) / len(samples)}
        if split == "train":
            self.worker.learn(samples)
            if self.ranks.rank == 0:
                with Hooks("scheduler", self.scheduler):
                    self.scheduler.learn(samples)
                    metrics |= self.scheduler.metrics()
        for prompt, answers in answers_of(samples, epoch):
            # A prompt may have been in another step of the epoch, in the place of another.
            known = sum(answer.epoch == epoch for answer in self.history.answers(prompt, split))
            moved = [replace(each, sample=each.sample + known) for each in answers] if known else answers
            self.history.add(prompt, moved, split)
        self.worker.follow(self.history)
        sizes = {"history/tokens": float(self.history.num_tokens), "history/bytes": float(self.history.bytes)}
        return {**self.ranks.broadcast(metrics), **sizes}

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The run-ahead state of all ranks together. Called on all of them."""
        state = united(self.ranks.gather(self.run_ahead_state))
        return {"ahead": state.state_dict() if state is not None else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` returned, on as many ranks as there were or on others."""
        ahead = state["ahead"]
        self.run_ahead_state = RunAheadState.of_state(ahead) if ahead is not None else None


def _with_draft(request: RolloutRequest, output: Output | None) -> RolloutRequest:
    return replace(request, prefetched=output.token_ids) if output is not None else request
