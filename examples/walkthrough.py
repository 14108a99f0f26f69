"""A walk through rhymerl in plain Python: from a random model to a trained one, in well under a minute.

    python examples/walkthrough.py

Nothing is downloaded and no configuration file is read: every part is an object that you make and pass on.
"""

import logging
import random
import warnings

from lightning import Trainer

from rhymerl import GRPO, PolicySource, PromptDataModule, Reward, RhymeModule, RolloutSettings, UpdateSettings
from rhymerl.tasks import Task
from rhymerl.training.evaluation import EvaluationSettings

LETTERS = "abcdefgh"


# 1. A task. `problem` draws one; which problems are for training and which are held out follows from their text.
class LastLetter(Task):
    """`fbd` is to go on as it ended: `dddd`."""

    reward = "walkthrough.share_of_letter"  # by this name a YAML file would use it

    def problem(self, random_source: random.Random) -> dict:
        word = "".join(random_source.choices(LETTERS, k=3))
        return {"prompt": word, "letter": word[-1]}


# 2. A reward: a function of the answer's text and of any columns of the problem's row.
def share_of_letter(completion: str, *, letter: str) -> float:
    """The share of the answer that is the wanted letter."""
    return completion.count(letter) / max(len(completion), 1)


def main(steps: int = 200) -> tuple[float, float]:
    """Train for `steps` steps; returns the held-out reward before and after."""
    # 3. A policy from scratch, with one token a character. PolicySource("path/to/model") loads one instead.
    policy = PolicySource(
        init={
            "model_type": "qwen2",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
        },
        characters=LETTERS,
    )

    # 4. The trainable whole: 8 answers a prompt of at most 6 tokens, compared with one another by GRPO.
    module = RhymeModule(
        policy,
        GRPO(),
        rollout=RolloutSettings(group_size=8, max_tokens=6),
        update=UpdateSettings(learning_rate=2e-3),
        evaluation=EvaluationSettings(samples=4),
        # A function of the main script cannot be imported by another process, so it runs in this one.
        rewards=Reward(share_of_letter, where="main"),
    )
    data = PromptDataModule(task=LastLetter(train_size=64, validation_size=32), prompts_per_step=16)

    # 5. Lightning runs it. Loggers, callbacks, precision and checkpoints are the Trainer's, as ever.
    trainer = Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    before = trainer.validate(module, data, verbose=False)[0]["eval/reward"]
    trainer.fit(module, data)
    after = trainer.validate(module, data, verbose=False)[0]["eval/reward"]

    # 6. The last step's answers are still at hand: tokens, log-probs, texts, rewards.
    print(f"held-out reward: {before:.2f} before, {after:.2f} after {steps} steps")
    for sample in module.last_rollout.samples[::24]:
        first = sample.completion.logprobs[0]
        print(
            f"{sample.prompt.text} {sample.text:7} reward {sample.reward:.2f}  log-prob of its first token {first:.2f}"
        )
    return before, after


if __name__ == "__main__":
    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    main()
