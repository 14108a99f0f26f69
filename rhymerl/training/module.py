"""The LightningModule: one batch is one rollout step; `training_step` runs its rollout and all its optimizer steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, cast

import lightning as L
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from rhymerl.algos.base import Algorithm
from rhymerl.algos.grpo import GRPO
from rhymerl.backends.base import Backend
from rhymerl.backends.embedded import EmbeddedBackend
from rhymerl.budgets import Budget, GoodputBudget
from rhymerl.config import instantiate
from rhymerl.data import PromptBatch, PromptDataModule
from rhymerl.distributed import Alone, Ranks
from rhymerl.distributed.group import Group
from rhymerl.drafters.base import Drafter
from rhymerl.drafters.history_tree import HistoryTreeDrafter
from rhymerl.drafters.run_ahead import RunAheadDrafter
from rhymerl.environments.base import Environment
from rhymerl.environments.build import environment_of, prepared
from rhymerl.errors import require_at_least
from rhymerl.history import HistoryStore
from rhymerl.models.critic import CriticSettings
from rhymerl.models.fingerprint import fingerprint
from rhymerl.models.lora import check_adapters, in_full_precision
from rhymerl.models.policy import Policy, PolicySource, suit_experts
from rhymerl.models.sharding import is_sharded
from rhymerl.progress import SILENT
from rhymerl.rewards import Reward, RewardScorer
from rhymerl.rollout import RECORDS, Rollout, RolloutLoop, RolloutSettings
from rhymerl.schedulers.base import Scheduler
from rhymerl.schedulers.fifo import FIFOScheduler
from rhymerl.training.checkpoint import state_in
from rhymerl.training.checks import check_algorithm, check_answers_fit, check_workers, longest_tokens, warn_of_parts
from rhymerl.training.episodes import checked_episodes
from rhymerl.training.evaluation import EvaluationSettings, Evaluator, step_name
from rhymerl.training.given_rewards import RewardTrial, check_tags, checked_rewards
from rhymerl.training.hyperparameters import arguments_of, refuse_lost
from rhymerl.training.loggers import log_step
from rhymerl.training.memory import setup_of
from rhymerl.training.offload import offload
from rhymerl.training.settings import Rates, UpdateSettings
from rhymerl.training.state import Resumed, check_base, load_state, state_of
from rhymerl.training.teacher import TeacherSettings
from rhymerl.training.trainer import (
    AFTER_EXCEPTION,
    TeardownOnException,
    datamodule_of,
    end_ranks,
    follow_trainer,
    num_optimizer_steps,
    performance,
    prepare_trainer,
    validate_within_fit,
)
from rhymerl.training.updater import Updater
from rhymerl.types import Split
from rhymerl.workers import RunAhead, backend_of_workers, check_run_ahead

Node = Mapping[str, Any]  # a component as plain config, with `_target_`


class RhymeModule(L.LightningModule):
    """GRPO and its variants under `Trainer.fit(module, datamodule)`.

    Every component may be an object or its config node; `model` also a directory or hub name. `rewards` None takes the
    task's reward, else the sum of the environment's; `environment` None takes a task that replies.
    """

    reference: PreTrainedModel | None  # set past nn.Module's registration: no submodule, and in no checkpoint

    def __init__(
        self,
        model: PolicySource | Policy | str | Node,
        algo: Algorithm | Node | None = None,
        *,
        critic: CriticSettings | Node | None = None,
        teacher: TeacherSettings | Node | None = None,
        rollout: RolloutSettings | Node | None = None,
        update: UpdateSettings | Node | None = None,
        evaluation: EvaluationSettings | Node | None = None,
        drafter: Drafter | Node | None = None,
        budget: Budget | Node | None = None,
        history: HistoryStore | Node | None = None,
        scheduler: Scheduler | Node | None = None,
        backend: Backend | Node | None = None,
        run_ahead: RunAhead = "off",
        max_staleness: int = 1,
        workers: int | None = None,
        rewards: Any = None,
        reward_workers: int = 1,
        environment: Environment | Node | None = None,
        environment_workers: int = 2,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_run_ahead(run_ahead, max_staleness)
        require_at_least({"reward_workers": (reward_workers, 1), "environment_workers": (environment_workers, 1)})
        require_at_least({"workers": (1 if workers is None else workers, 1)})
        self.automatic_optimization = False
        refuse_lost(model=model, algo=algo, critic=critic, teacher=teacher, rollout=rollout, update=update)
        refuse_lost(drafter=drafter, budget=budget, history=history, scheduler=scheduler, backend=backend)
        refuse_lost(evaluation=evaluation, environment=environment)
        self.algo: Algorithm = instantiate(algo, key="algo", default=GRPO, kind=Algorithm)
        self.critic_settings: CriticSettings = instantiate(critic, key="critic", default=CriticSettings)
        self.teacher: TeacherSettings = instantiate(teacher, key="teacher", default=TeacherSettings)
        self.rollout: RolloutSettings = instantiate(rollout, key="rollout", default=RolloutSettings)
        self.update: UpdateSettings = instantiate(update, key="update", default=UpdateSettings)
        self.evaluation: EvaluationSettings = instantiate(evaluation, key="evaluation", default=EvaluationSettings)
        self.drafter: Drafter = instantiate(drafter, key="drafter", default=HistoryTreeDrafter, kind=Drafter)
        self.budget: Budget = instantiate(budget, key="budget", default=GoodputBudget, kind=Budget)
        self.history: HistoryStore = instantiate(history, key="history", default=HistoryStore)
        self.scheduler: Scheduler = instantiate(scheduler, key="scheduler", default=FIFOScheduler, kind=Scheduler)
        self.backend = backend_of_workers(instantiate(backend, key="backend", default=EmbeddedBackend, kind=Backend))
        self.run_ahead, self.max_staleness, self.workers = run_ahead, max_staleness, workers
        self.rewards = instantiate(rewards, key="rewards")
        self.reward_workers, self.environment_workers, self.seed = reward_workers, environment_workers, seed
        check_algorithm(self.algo, rollout=self.rollout, update=self.update, backend=self.backend)
        source = PolicySource(model) if isinstance(model, str) else instantiate(model, key="model")
        self.policy: Policy = source.load() if isinstance(source, PolicySource) else source
        check_adapters(self.policy.model)
        self.environment = prepared(environment, self.policy.tokenizer)
        self.model: PreTrainedModel = self.policy.model.train()
        self.num_rollouts = 0  # rollout steps whose update is in the weights
        self.num_tokens = 0  # response tokens trained on
        self.evaluator = Evaluator(self.evaluation, self.budget, self.scheduler)
        self.logged: dict[str, float] = {}  # what the loggers have of the latest step
        self.first_epochs: dict[Split, int] = {"train": 0, "validation": 0}  # later where history is another run's too
        self.last_rollout: Rollout | None = None  # for callbacks
        self.progress = SILENT  # hears of each answer of this rank's
        self._shares_engine = self._shares_prefixes = False
        self._ranks: Ranks | None = None
        self._resumed = Resumed()
        self._num_optimizer_steps = float("inf")
        self._loop: RolloutLoop | None = None
        self._updater: Updater | None = None
        self._scorer: RewardScorer | None = None
        self._rewards: list[Reward] = []
        self._trial = RewardTrial()
        # Now: later a checkpoint may have been loaded, and the reference is the policy that the module was given.
        object.__setattr__(self, "reference", self.teacher.reference(self.policy, self.algo))
        self.critic = self.critic_settings.build(self.policy, seed=seed) if "values" in self.algo.needs else None
        self._rates: Rates | None = None
        self.base_fingerprint = fingerprint(self.model) if self.policy.weights is None else None  # that comes with them
        self.teacher_fingerprint = self.teacher.fingerprint(self.reference)
        self.save_hyperparameters(arguments_of(self, source))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RhymeModule:
        """Lightning casts the whole module under bf16-true and 64-true, after it has restored a checkpoint."""
        with in_full_precision(self):
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        suit_experts(self.model)
        return self

    # -- set-up ------------------------------------------------------------------------------------------------

    def configure_callbacks(self) -> list[L.Callback]:
        """Refuse flags before Lightning starts, and tear down after exceptions, lest reward processes outlive a fit."""
        prepare_trainer(self.trainer, self.backend)
        return [TeardownOnException()]

    def setup(self, stage: str) -> None:
        """See `check`; the data module has been set up before."""
        self.check(datamodule_of(self.trainer))

    def check(self, datamodule: PromptDataModule) -> None:
        """Raise ConfigError for all that can be known to be wrong before any compute; the data has been prepared."""
        parts: Any = {"rollout": self.rollout, "evaluation": self.evaluation}
        check_answers_fit(self.policy, **parts)
        environment = environment_of(self.environment, datamodule.task)
        needed = longest_tokens(datamodule, **parts, has_environment=environment is not None)
        longest = min(needed, self.policy.context_tokens)
        told: Any = {"chat": datamodule.chat, "longest_tokens": longest, "num_processes": self.environment_workers}
        self._episodes = checked_episodes(environment, self.policy, self.rollout, datamodule.prompts, **told)
        self.backend.check(longest)
        self.backend.check_drafting(self.drafter, self.budget)
        if self.critic is not None:
            self.critic.check(longest)
        given: Any = {"algo": self.algo, "evaluation": self.evaluation, "environment": environment}
        self._rewards = checked_rewards(self.rewards, datamodule, **given)
        if self.rollout.skip_special_tokens:
            check_tags(self._rewards, self.policy)
        self._trial.run(self._rewards, datamodule)
        self.update.check(self.model, longest)
        teacher = self.teacher.check(self.reference, longest)
        self._prove = partial(self.update.prove, self.model, longest, critic=self.critic, teacher=teacher)
        if self.policy.weights is None and not is_sharded(self.model):  # else it was proven while whole, or will be
            self._shares_prefixes = self._prove()

    def warn(self, datamodule: PromptDataModule) -> None:
        """Say, on rank 0, what may surprise people in a training on this data, after `check`."""
        self.update.warn(self.model, says_routes=self.backend.says_routes)
        datamodule.warn()
        self._trial.warn()
        warn_of_parts(self.policy, self.rollout, self.backend, self._episodes, drafter=self.drafter, budget=self.budget)

    def on_fit_start(self) -> None:
        self.warn(datamodule_of(self.trainer))
        self._bring_up()

    def on_validation_start(self) -> None:
        self._bring_up()

    def _bring_up(self) -> None:
        """Start engine and reward pool, once the model is on its device."""
        if self._loop is not None:
            return
        if self.policy.weights is not None:
            self._shares_prefixes = self._prove()
        modes: Any = {"run_ahead": self.run_ahead, "lockstep": follow_trainer(self.drafter, self.budget)}
        size = self.trainer.world_size
        check_workers(self.backend, self.scheduler, workers=self.workers, num_ranks=size, **modes)
        autocast = self.trainer.precision_plugin.forward_context
        if self.reference is not None and self.reference is not self.model:
            nn.Module.to(self.reference, device=self.device, dtype=self.model.dtype)
        self._ranks = self._ranks or (Group(RECORDS) if size > 1 else Alone())
        is_trained = self._shares_engine or self.trainer.training
        self.backend.share_device(setup_of(self, self.trainer, datamodule_of(self.trainer)) if is_trained else None)
        self.backend.start(self.policy, self._rollout_drafter, budget=self.budget, autocast=autocast)
        self._scorer = RewardScorer(self._rewards, num_processes=self.reward_workers)
        self._loop = RolloutLoop(
            self.backend,
            self.scheduler,
            scorer=self._scorer,
            decode=self.decode,
            history=self.history,
            stop_token_ids=self.policy.stop_token_ids,
            seed=self.seed,
            device=self.device,
            ranks=self._ranks,
            max_staleness=self.max_staleness,
            num_workers=self.workers,
            progress=self.progress,
            episodes=self._episodes,
            **modes,
        )
        self._resumed.restore(self, self._loop, self._ranks)
        self._updater = Updater(
            self.model,
            self.algo,
            self.update,
            temperature=self.rollout.temperature,
            seed=self.seed,
            backward=self.manual_backward,
            autocast=autocast,
            draws_exactly=self.backend.draws_exactly,
            shares_prefixes=self._shares_prefixes,
            ranks=self._ranks,
            reference=self.reference,
            critic=self.critic,
        )

    def teardown(self, stage: str) -> None:
        """Free the engine and the reward processes; a later fit brings up new ones."""
        for part in (self._loop, self._scorer):
            if part is not None:
                part.close()
        if self._shares_engine and self._loop is not None and stage != AFTER_EXCEPTION:
            self.backend.release()
        else:
            self.backend.close()
            if self._ranks is not None:
                self._ranks.close()
            self._ranks = None
        self._loop = self._updater = self._scorer = None

    def fail(self, error: BaseException) -> None:
        """End this rank for an error, which the other ranks report as theirs; perhaps one of them has ended."""
        end_ranks(self.trainer)
        if self._ranks is not None:
            self._ranks.explain(error)
            self._ranks.fail(str(error) or type(error).__name__)

    @contextmanager
    def one_engine(self) -> Iterator[None]:
        """Context in which fits and validations share an engine, which may take long to bring up."""
        self._shares_engine = True
        try:
            yield
        finally:
            self._shares_engine = False
            self.teardown("end")

    def configure_optimizers(self) -> Any:
        optimizer = self.update.optimizer(list(self.model.parameters()), critic=self.critic)
        self._num_optimizer_steps = num_optimizer_steps(self.trainer, self.update.optimizer_steps)
        schedule = self.update.schedule(optimizer, self._num_optimizer_steps, critic=self.critic)
        self._rates = Rates(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    # -- training ------------------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Apply the settings over the checkpoint's former ones, and run an evaluation that is due."""
        assert self._rates is not None
        optimizer = cast(Any, self.optimizers()).optimizer
        self._rates.put_back(optimizer, cast(LambdaLR, self.lr_schedulers()))
        if self.update.offload_optimizer:
            offload(optimizer)
        self._evaluate_if_due()

    def training_step(self, batch: PromptBatch, batch_idx: int) -> STEP_OUTPUT:
        """Run one rollout step; `batch` is the same list of prompts on every rank."""
        assert self._loop is not None and self._updater is not None
        started, step = time.perf_counter(), self.num_rollouts
        self._loop.sync_weights(self.policy.named_weights(), policy_version=step)
        loader = datamodule_of(self.trainer).train_dataloader()
        epoch = self.first_epochs["train"] + loader.epoch
        is_last = self.trainer.global_step + self.update.optimizer_steps >= self._num_optimizer_steps
        following = None if is_last else loader.peek().prompts
        result = self._loop.run(
            batch.prompts, step, self.rollout, epoch=epoch, following=following, replacements=loader.replacements()
        )
        result.failures.check(self._rewards, "a step")
        optimizer, schedule = self.optimizers(), cast(LambdaLR, self.lr_schedulers())
        metrics = self._updater.run(result.samples, step, optimizer=optimizer, schedule=schedule)
        num_tokens = sum(sample.num_sampled for sample in result.samples)
        self.num_rollouts, self.num_tokens = step + 1, self.num_tokens + num_tokens
        loader.advance()
        self.last_rollout = result
        timing = performance(num_tokens, time.perf_counter() - started, self.device)
        metrics = {**result.metrics, **metrics, **timing, "num_tokens": float(self.num_tokens)}
        self.logged = log_step(self.trainer, metrics, self.num_rollouts)
        return None

    def on_train_batch_end(self, outputs: STEP_OUTPUT, batch: PromptBatch, batch_idx: int) -> None:
        """Called after all callbacks, so that the step is in a checkpoint before it is evaluated."""
        assert self._updater is not None
        self._updater.forget()
        self._evaluate_if_due()

    def advantages(self, indices: Sequence[int]) -> list[float | None]:
        """Return, at a step's end, the mean advantage over the tokens of `last_rollout`'s samples at `indices`."""
        assert self._updater is not None
        return self._updater.advantages(indices)

    @cached_property
    def _rollout_drafter(self) -> Drafter:
        """Return one drafter for the life of the module, by which an engine is recognised as its own."""
        return RunAheadDrafter(self.drafter) if self.run_ahead in ("draft", "auto") else self.drafter

    def decode(self, token_ids: Any) -> str:
        """Return the text of an answer, as rewards get it."""
        return self.policy.decode(token_ids, skip_special_tokens=self.rollout.skip_special_tokens)

    # -- evaluation ----------------------------------------------------------------------------------------------

    def _evaluate_if_due(self) -> None:
        if self.evaluator.is_due(self.num_rollouts) and not self.trainer.should_stop:
            validate_within_fit(self.trainer)

    def on_validation_epoch_start(self) -> None:
        """Put aside what training has learned: it serves the evaluation, too, but learns nothing from it."""
        assert self._loop is not None
        self.evaluator.begin()
        self._loop.sync_weights(self.policy.named_weights(), policy_version=self.num_rollouts)

    def validation_step(self, batch: PromptBatch, batch_idx: int, dataloader_idx: int = 0) -> STEP_OUTPUT:
        """Answers with the same noise every time, so that two evaluations differ by the policy alone."""
        assert self._loop is not None
        name = datamodule_of(self.trainer).validation_names[dataloader_idx]
        settings = self.evaluation.rollout(self.rollout, name)
        epoch = self.first_epochs["validation"] + self.evaluator.num_done
        result = self._loop.run(batch.prompts, step_name(name), settings, epoch=epoch, split="validation")
        self.evaluator.add(name, result)
        return None

    def on_validation_epoch_end(self) -> None:
        metrics = self.evaluator.end(self._rewards, step=self.num_rollouts)
        if metrics:
            # The step is where Lightning puts them in the curves; they are the same on all ranks.
            self.log_dict({**metrics, "step": float(self.trainer.global_step)}, batch_size=1, sync_dist=True)
            self.logged = {**self.logged, **metrics}

    # -- state -----------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Called on every rank, since each has something that only it knows."""
        checkpoint["rhymerl"] = state_of(self, self._loop, self._ranks or Alone())

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Raise ConfigError for another version's checkpoint, and for a run that began with other weights."""
        state = state_in(checkpoint, "the checkpoint")
        if self._trainer is not None:
            check_base(self, state, "the checkpoint")
        load_state(self, state)
        self._resumed.keep(state)
        self._resumed.restore(self, self._loop, self._ranks)
