"""An optimizer step of rhymerl and of TRL's GRPOTrainer on the same tensors.

The same Qwen2 of random weights, the same prompts, answers (lengths spread evenly from a quarter of the longest to the longest) and
advantages: losses with their backwards, clipping and AdamW over the whole step, in a mean over tokens, without reference. A backward
takes as many padded tokens on both sides (--batch samples of the longest). Steps alternate between the sides; `speedup` is TRL's
time over ours, step by step. The gradients' norms have to agree, or there is no result.

    python benchmarks/update_speed.py --trl-python PYTHON_WITH_TRL

TRL has its own requirements, so give it its own environment (pip install trl datasets). Without --trl-python our side runs
alone, and `speedup` is null. `padding` is padded over useful tokens of each side.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import record
import torch

from rhymerl.algos import GRPO
from rhymerl.models.policy import Policy, PolicySource
from rhymerl.testing import make_prompt
from rhymerl.training.batches import micro_batches, step_batch, total_tokens
from rhymerl.training.settings import UpdateSettings
from rhymerl.training.updater import Updater
from rhymerl.types import Completion, Output, RolloutRequest, Sample, SamplingParams

PROMPT_TOKENS = 16
QUIET = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TRL_USAGE_STATS_DISABLED": "1"}


def make_policy(arguments: Any) -> Policy:
    init = {
        "model_type": "qwen2",
        "vocab_size": arguments.vocabulary,
        "hidden_size": arguments.hidden,
        "intermediate_size": 4 * arguments.hidden,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    }
    return PolicySource(init=init, seed=arguments.seed).load()


def make_samples(arguments: Any) -> list[Sample]:
    """Groups of four; half of the answers are right."""
    source = np.random.default_rng(arguments.seed)
    sampling = SamplingParams(max_tokens=arguments.longest)
    samples = []
    for number in range(arguments.samples):
        if number % 4 == 0:
            prompt = make_prompt(source.integers(2, 17, PROMPT_TOKENS).tolist(), id=str(number))
        length = int(source.integers(arguments.longest // 4, arguments.longest, endpoint=True))
        generated = Output(
            token_ids=source.integers(2, 17, length).astype(np.int32),
            logprobs=np.zeros(length),
            policy_versions=np.zeros(length, np.int32),
        )
        request = RolloutRequest(id=str(number), prompt=prompt, sample=number % 4, seed=number, sampling=sampling)
        completion = Completion(request=request, output=replace(generated, finish_reason="stop"))
        reward = float(source.integers(2))
        mask = np.ones(length, np.bool_)
        samples.append(Sample(completion=completion, text="", reward=reward, rewards={}, loss_mask=mask))
    return samples


class OnPolicy(GRPO):
    """TRL's choice where a batch is used once: the ratio's denominator is the policy itself."""

    def loss(self, batch: Any, output: Any, totals: Any) -> Any:
        return super().loss(replace(batch, behaviour_logprobs=output.logprobs.detach()), output, totals)


class Ours:
    """Takes a step when called."""

    def __init__(self, policy: Policy, samples: Sequence[Sample], arguments: Any) -> None:
        settings = UpdateSettings(learning_rate=0.0, micro_batch_tokens=budget(arguments))
        self.samples = samples
        self.model = policy.model.train()
        self.optimizer = settings.optimizer(list(self.model.parameters()))
        self.schedule = settings.schedule(self.optimizer, float("inf"))
        self.updater = Updater(
            self.model,
            OnPolicy(correction="none"),
            settings,
            temperature=1.0,
            seed=arguments.seed,
            backward=torch.Tensor.backward,
            autocast=nullcontext,
        )
        self.grad_norm = 0.0

    def __call__(self) -> float:
        return record.seconds(self._step)

    def _step(self) -> None:
        found = self.updater.run(self.samples, 0, optimizer=self.optimizer, schedule=self.schedule)
        self.grad_norm = found["grad_norm"]


class Peer:
    """The same in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.versions: dict[str, str] = self._answer()
        self.grad_norm = 0.0

    def __call__(self) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        found = self._answer()
        self.grad_norm = found["grad_norm"]
        return float(found["step_s"])

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("update_peer.py ended; its error is above")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def started(policy: Policy, samples: Sequence[Sample], arguments: Any) -> Iterator[Peer | None]:
    """TRL's side, if there is one."""
    if arguments.trl_python is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        policy.save(folder / "policy")
        advantages = OnPolicy(correction="none").prepare(step_batch(samples)).advantages
        assert advantages is not None
        data = {
            "prompts": [sample.prompt.token_ids.tolist() for sample in samples],
            "answers": [sample.completion.token_ids.tolist() for sample in samples],
            "advantages": advantages[:, 0].tolist(),
        }
        (folder / "step.json").write_text(json.dumps(data))
        command = [arguments.trl_python, str(Path(__file__).with_name("update_peer.py"))]
        command += ["--policy", str(folder / "policy"), "--folder", name, "--batch", str(arguments.batch)]
        command += [] if arguments.threads is None else ["--threads", str(arguments.threads)]
        environment = {**os.environ, **QUIET}
        with subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            yield Peer(process)
            assert process.stdin is not None
            process.stdin.close()


def budget(arguments: Any) -> int:
    """Padded tokens of a backward."""
    return int(arguments.batch * (PROMPT_TOKENS + arguments.longest))


def padding(samples: Sequence[Sample], arguments: Any) -> dict[str, float]:
    """Padded over useful tokens."""
    useful = sum(map(total_tokens, samples))
    parts = micro_batches(samples, range(len(samples)), budget(arguments))
    ours = sum(len(part) * max(total_tokens(samples[i]) for i in part) for part in parts)
    theirs = len(samples) * (PROMPT_TOKENS + max(map(len, samples)))
    return {"rhymerl": round(ours / useful, 3), "trl": round(theirs / useful, 3)}


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = record.options(__doc__, repeats=9)
    parser.add_argument("--trl-python", help="interpreter of an environment with TRL")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8, help="samples of the longest length in a backward")
    parser.add_argument("--longest", type=int, default=256, help="response tokens")
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    arguments = parser.parse_args(words)
    record.set_threads(arguments.threads)
    start = record.environment()
    policy, samples = make_policy(arguments), make_samples(arguments)
    with started(policy, samples, arguments) as peer:
        ours = Ours(policy, samples, arguments)
        sides = {"rhymerl": ours} if peer is None else {"rhymerl": ours, "trl": peer}
        times = record.interleaved(sides, repeats=arguments.repeats)
    if peer is not None and abs(ours.grad_norm / peer.grad_norm - 1) > 1e-3:
        raise SystemExit(f"not the same work: gradients of norm {ours.grad_norm} and {peer.grad_norm}")
    tokens = sum(map(len, samples))
    shares = padding(samples, arguments)
    return record.finish(
        "update_speed",
        __doc__,
        arguments,
        rows=[
            {
                "side": side,
                "step_s": record.spread(values),
                "tokens_per_s": record.spread(tokens / value for value in values),
                "padding": shares[side],
            }
            for side, values in times.items()
        ],
        start=start,
        speedup=None
        if peer is None
        else record.spread(b / a for a, b in zip(times["rhymerl"], times["trl"], strict=True)),
        versions=None if peer is None else peer.versions,
    )


if __name__ == "__main__":
    main()
