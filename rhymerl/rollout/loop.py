"""The rollout loop: prompts in, scored samples out. It knows no variant of anything, only the bases."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from rhymerl.backends.base import Backend
from rhymerl.distributed import Alone, Ranks
from rhymerl.environments.build import EpisodeSettings
from rhymerl.errors import BackendError, EpisodeError, RunError
from rhymerl.history import HistoryStore
from rhymerl.history.answers import answers_of
from rhymerl.hooks import Hooks
from rhymerl.progress import SILENT, ProgressBar
from rhymerl.rewards import RewardScorer
from rhymerl.rewards.failures import Failures
from rhymerl.rollout.ahead import ScoringAhead
from rhymerl.rollout.base import Rollout, RolloutSettings, requests_of
from rhymerl.rollout.metrics import metrics_of, rollout_metrics, staleness_metrics
from rhymerl.rollout.results import RankResult, SamplingRound, ScoredOutput, groups_that_teach_nothing, replaced
from rhymerl.schedulers.base import Scheduler
from rhymerl.types import Completion, IntArray, Prompt, RolloutRequest, Sample, Split
from rhymerl.workers import RunAhead, RunAheadState, StepRequests, check_run_ahead, workers_of
from rhymerl.workers.run_ahead_rules import rule_of
from rhymerl.workers.run_ahead_state import merge_states

Decode = Callable[["IntArray"], str]


class RolloutLoop:
    """Asks backends for answers, scores them as they finish, and lets history, scheduler and drafters learn.

    Every rank has a loop over a backend of its own, which has been started, and they run the same steps together; each
    gets the whole step's samples. A backend of workers apart from the ranks answers with `num_workers` of them, None =
    one a rank. `run_ahead` is a mode of `RunAhead`; with `lockstep` nothing follows the clock, so that a run over
    several ranks repeats bit for bit. Raises ValueError for arguments that contradict one another.
    """

    def __init__(
        self,
        backend: Backend,
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
        num_workers: int | None = None,
        progress: ProgressBar = SILENT,
        episodes: EpisodeSettings | None = None,
    ) -> None:
        check_run_ahead(run_ahead, max_staleness)
        self.scheduler = scheduler
        scheduler.work_for(backend.max_running)
        scheduler.lockstep = lockstep
        self.scorer = scorer
        self.decode = decode
        self._requests = partial(requests_of, seed=seed, stop_token_ids=tuple(stop_token_ids))
        self.device = device
        self.progress = progress  # hears of each answer of this rank
        self.ranks = ranks if ranks is not None else Alone()
        self.run_ahead = run_ahead
        self.max_staleness = max_staleness
        self.history = history if history is not None else HistoryStore()
        self.policy_version = 0
        self._episodes = episodes.words if episodes is not None else ""
        self._rule = rule_of(run_ahead)
        self.workers = workers_of(
            backend,
            self._rule.planner(scheduler),
            num_workers=num_workers,
            ranks=self.ranks,
            run_ahead=self._rule.mode,
            max_staleness=max_staleness,
            lockstep=lockstep,
            episodes=replace(episodes, lockstep=lockstep) if episodes is not None else None,
        )
        self.workers.follow(self.history)
        self._scoring_ahead = ScoringAhead(self.workers, scorer, decode)

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
        """Return `group_size` scored answers a prompt.

        `step` keys the noise; `epoch` and `split` say where in the history the answers go. Drafter and scheduler learn
        from the split `train` only; the history of the other serves its own drafts. `following` are the next step's
        prompts, for workers that run ahead; without them none does. `replacements` are other prompts, for groups that
        teach nothing (`settings.dynamic_sampling`). Called on all ranks, with the same arguments.
        """
        self._scoring_ahead.stop()
        requests = self._requests(prompts, step, settings, split=split)
        rounds = [self._round(requests, step, split, self._following(following, step, settings))]
        samples = rounds[0].samples
        for number in range(1, settings.dynamic_sampling + 1 if replacements is not None else 1):
            useless = groups_that_teach_nothing(samples)
            fresh = list(itertools.islice(replacements or (), len(useless)))
            if not fresh:
                break
            again = self._requests(fresh, step, settings, split=split, round_number=number)
            rounds.append(self._round(again, step, split, None))
            samples = replaced(samples, useless, rounds[-1].samples)
        if all(sample.completion.finish_reason == "environment" for sample in samples):
            raise EpisodeError(
                f"step {step}: the environment failed in all {len(samples):,} episodes; a warning says how"
            )
        if split == "train":
            self._scoring_ahead.forget()
            self.workers.sleep()
        metrics = {
            **rollout_metrics(samples),
            **metrics_of(rounds),
            **staleness_metrics(samples, self.policy_version),
            **self._learn(rounds, epoch, split),
        }
        results = [result for each in rounds for result in each.by_rank]
        failures = sum((result.failures for result in results), Failures())
        spans = [span for result in results for span in result.spans]
        self._scoring_ahead.start()
        return Rollout(samples=samples, metrics=metrics, failures=failures, spans=spans)

    def _round(
        self,
        requests: list[RolloutRequest],
        step: int | str,
        split: Split,
        following: list[RolloutRequest] | None,
    ) -> SamplingRound:
        """Return all answers to these requests, on every rank."""
        started = time.perf_counter()
        if self._episodes:
            self.progress.note(lambda: f", {self.workers.num_waiting:,} wait for replies")
        work = StepRequests(step=step, requests=requests, following=following, split=split, episodes=self._episodes)
        # Each is scored the moment it is done.
        answers = {each.request.id: (each, self._score(each)) for each in self.workers.answer(work)}
        rollout_s = time.perf_counter() - started
        results = self.ranks.gather(self._result(requests, answers, rollout_s))
        self.workers.end_step()
        samples = self._samples(requests, [each for result in results for each in result.scored])
        age = self.policy_version - min(
            int(s.completion.output.policy_versions.min(initial=self.policy_version)) for s in samples
        )
        if age > (self.max_staleness if self.run_ahead == "keep" else 0):
            raise RunError(f"step {step}: a token was sampled {age} updates ago")
        scored_s = time.perf_counter() - started - rollout_s
        return SamplingRound(samples=samples, by_rank=results, num_moves=self.workers.num_moves, scored_s=scored_s)

    def sync_weights(self, named_tensors: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """Hand over the policy of the steps to come."""
        self.policy_version = policy_version
        self.workers.sync_weights(named_tensors, policy_version)

    # -- the beginning of a step ---------------------------------------------------------------------------------

    def _following(
        self, prompts: Sequence[Prompt] | None, step: int | str, settings: RolloutSettings
    ) -> list[RolloutRequest] | None:
        if prompts is None or not isinstance(step, int) or not self._rule.begins():
            return None
        return self._requests(prompts, step + 1, settings)

    # -- its answers ---------------------------------------------------------------------------------------------

    def _score(self, completion: Completion) -> str:
        request = completion.request
        text = self._scoring_ahead.text(completion)
        self.scorer.submit(request.id, text, request.prompt.columns, completion)
        self.progress.advance()
        return text

    def _result(
        self, requests: Sequence[RolloutRequest], answers: Mapping[str, tuple[Completion, str]], rollout_s: float
    ) -> RankResult:
        order = [(index, request.id) for index, request in enumerate(requests) if request.id in answers]
        scores = self.scorer.collect(device=self.device, order=[name for _, name in order])
        return RankResult(
            scored=[
                ScoredOutput(index=index, output=answers[name][0].output, text=answers[name][1], rewards=scores[name])
                for index, name in order
            ],
            metrics={**self.workers.metrics(), **self.scorer.metrics()},
            busy_s=self.workers.busy_s,
            rollout_s=rollout_s,
            sampled_s=self.workers.sampled_s,
            failures=self.scorer.failures(),
            spans=self.workers.spans(),
        )

    def _samples(self, requests: Sequence[RolloutRequest], scored: Sequence[ScoredOutput]) -> list[Sample]:
        """Return the samples in canonical order. Raises BackendError unless each request has exactly one answer."""
        if sorted(each.index for each in scored) != list(range(len(requests))):
            raise BackendError(f"{len(scored)} answers to {len(requests)} requests: some were lost or came twice")
        return [self._sample(requests[each.index], each) for each in sorted(scored, key=lambda each: each.index)]

    def _sample(self, request: RolloutRequest, scored: ScoredOutput) -> Sample:
        rewards, functions = scored.rewards, self.scorer.rewards
        applied = [reward.weight * rewards[reward.name] for reward in functions if reward.name in rewards]
        return Sample(
            completion=Completion(request=request, output=scored.output),
            text=scored.text,
            reward=sum(applied) if applied or not functions else math.nan,
            rewards=rewards,
            loss_mask=scored.output.sampled,
            turn_weight=self.scorer.turn_weight,
        )

    # -- its end -------------------------------------------------------------------------------------------------

    def _learn(self, rounds: Sequence[SamplingRound], epoch: int, split: Split) -> dict[str, float]:
        """Update drafter, scheduler and history, also by replaced groups; return metrics, the coordinator's too."""
        samples = [sample for each in rounds for sample in each.samples]
        metrics = {"sched/migration_rate": sum(each.num_moves for each in rounds) / len(samples)}
        if split == "train":
            self._rule.learn(samples)
            self.workers.learn(samples)
            if self.ranks.rank == 0:
                with Hooks("scheduler", self.scheduler):
                    self.scheduler.learn(samples)
                    metrics |= self.scheduler.metrics()
        for prompt, answers in answers_of(samples, epoch):
            # A prompt may have been in another step of the epoch, in the place of another.
            known = sum(answer.epoch == epoch for answer in self.history.answers(prompt, split))
            moved = [replace(each, sample=each.sample + known) for each in answers] if known else answers
            self.history.add(prompt, moved, split)
        self.workers.follow(self.history)
        sizes = {"history/tokens": float(self.history.num_tokens), "history/bytes": float(self.history.bytes)}
        return {**self.ranks.broadcast(metrics), **sizes}

    def close(self) -> None:
        """No more steps; backend and scorer are closed by their owners, after this."""
        self._scoring_ahead.close()
        self.workers.close()

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The run-ahead state of all ranks together. Called on all of them."""
        state = merge_states(self.ranks.gather(self.workers.state()))
        return {"ahead": state.state_dict() if state is not None else None, "rule": self._rule.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` returned, on as many ranks as there were or on others."""
        ahead = state["ahead"]
        self.workers.restore(RunAheadState.of_state(ahead) if ahead is not None else None)
        if rule := state["rule"]:  # of another mode there is none
            self._rule.load_state_dict(rule)
        self.workers.follow(self.history)  # under fsdp2 it has been loaded since the workers were made
