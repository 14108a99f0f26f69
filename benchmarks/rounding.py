"""Where the log-probs of a bfloat16 model come apart when the shape of a pass changes, and what would keep them together.

For each way of attention: answers decoded side by side, token by token, against all their tokens in one pass, in nats of a token's log-prob. `plain` is torch's
attention; `padded keys` has so many keys that 16 divides them; `padded keys, four queries` has at least four rows of queries, too; `... and a gap`
has, in the one pass alone, masked keys between prompt and answer, as an update with shared prompts and a tree of drafts have them. `time` is that
of attention alone over 150 keys, against `plain`. `unequal_attention` is the share of values of one layer's attention that differ between all positions
at once and each alone; `unequal_products` counts, by the number of rows in a matrix product, rows that differ in their last bit or more from those of one large product.

    python benchmarks/rounding.py [--dtype float32]
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import record
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache, PreTrainedModel

from rhymerl.config import compose
from rhymerl.models.policy import DTYPES, Policy, PolicySource

NAME = "rounding"
KEYS = 150
COUNTS = (1, 2, 3, 4, 8, 12, 36, 84, 257)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How keys and queries are laid out for one attention."""

    multiple: int = 1  # of the number of keys
    queries: int = 1  # at least so many rows
    gap: int = 0  # masked keys behind the prompt, where a pass has more than one token of an answer

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, prompt: int = 0) -> Tensor:
        """query [B, heads, Q, dim], the last of S positions; key and value [B, kv_heads, S, dim]. -> [B, Q, heads, dim]."""
        (batch, heads, width, dim), (kv_heads, seen) = query.shape, key.shape[1:3]
        visible = torch.ones(width, seen, dtype=torch.bool).tril(seen - width)
        gap = self.gap if width > 1 and prompt else 0
        padding = -(seen + gap) % self.multiple
        key, value = (self._spread(part, prompt, gap, padding, dim=2).contiguous() for part in (key, value))
        visible = self._spread(visible, prompt, gap, padding, dim=1)
        # heads of a group are more rows of queries, as in the engine
        rows = query.reshape(batch, kv_heads, -1, dim)
        mask = torch.zeros(visible.shape, dtype=query.dtype).masked_fill_(~visible, float("-inf"))
        mask = mask.repeat(heads // kv_heads, 1)
        more = max(0, self.queries - rows.shape[2])
        rows, mask = F.pad(rows, (0, 0, 0, more)), F.pad(mask, (0, 0, 0, more))
        out = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scale)
        return out[:, :, : out.shape[2] - more].reshape(batch, heads, width, dim).transpose(1, 2)

    @staticmethod
    def _spread(part: Tensor, prompt: int, gap: int, padding: int, *, dim: int) -> Tensor:
        """Zeros behind the prompt and at the end."""

        def zeros(count: int) -> Tensor:
            return part.new_zeros(*part.shape[:dim], count, *part.shape[dim + 1 :])

        return torch.cat(
            (
                part.narrow(dim, 0, prompt),
                zeros(gap),
                part.narrow(dim, prompt, part.shape[dim] - prompt),
                zeros(padding),
            ),
            dim=dim,
        )


WAYS = {
    "plain": Way(),
    "padded keys": Way(multiple=16),
    "padded keys, four queries": Way(multiple=16, queries=4),
    "padded keys, four queries and a gap": Way(multiple=16, queries=4, gap=37),
}


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **kwargs: Any
) -> tuple[Tensor, None]:
    """`Way.attend` as transformers calls it."""
    return kwargs["way"].attend(query, key, value, scaling, kwargs["prompt"]), None


AttentionInterface.register(NAME, attention)


def answers(policy: Policy, count: int, tokens: int) -> tuple[Tensor, int]:
    """Prompts of one length and what the model answers, sampled at temperature 1: [count, length]; and the length of a prompt."""
    questions = (f"What is {23 + 5 * number} + {88 - 3 * number}? Explain each step." for number in range(count))
    prompts = [
        policy.tokenizer.apply_chat_template([{"role": "user", "content": each}], add_generation_prompt=True)
        for each in questions
    ]
    ids = torch.tensor([prompt["input_ids"] for prompt in prompts])
    length = {"min_new_tokens": tokens, "max_new_tokens": tokens}
    ids_with_answers = policy.model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, **length
    )
    return ids_with_answers, ids.shape[1]


def in_one_pass(model: PreTrainedModel, way: Way, ids: Tensor, prompt: int) -> Tensor:
    """Log-probs [answers, tokens] of the answers, each of which is in a pass of its own."""
    run = partial(model, use_cache=False, way=way, prompt=prompt)
    return chosen(torch.cat([run(row[None]).logits[:, prompt - 1 : -1] for row in ids]), ids[:, prompt:])


def token_by_token(model: PreTrainedModel, way: Way, ids: Tensor, prompt: int) -> Tensor:
    """The same, decoded side by side: the prompts in one pass, then a pass a token."""
    run = partial(model, past_key_values=DynamicCache(config=model.config), use_cache=True, way=way, prompt=0)
    passes = [ids[:, :prompt], *ids[:, prompt:-1].split(1, dim=1)]
    return chosen(torch.stack([run(each).logits[:, -1] for each in passes], dim=1), ids[:, prompt:])


def chosen(logits: Tensor, tokens: Tensor) -> Tensor:
    """logits [..., vocabulary], tokens [...] -> log-probs [...]."""
    return logits.float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


def unequal_products(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, int]:
    """By the number of rows in a product: of 512 rows times each weight, with one thread and two, those that differ from one product of all."""
    shapes = {tuple(part.weight.shape) for part in model.modules() if isinstance(part, nn.Linear)}
    threads, unequal = torch.get_num_threads(), dict.fromkeys(map(str, COUNTS), 0)
    for height, width in sorted(shapes):
        rows, weight = torch.randn(512, width).to(dtype), torch.randn(height, width).to(dtype)
        whole = F.linear(rows, weight)
        for number in (1, 2):
            torch.set_num_threads(number)
            for count in COUNTS:
                parts = torch.cat([F.linear(each, weight) for each in rows.split(count)])
                unequal[str(count)] += int((parts != whole).any(1).sum())
        torch.set_num_threads(threads)
    return unequal


def layer(model: PreTrainedModel, dtype: torch.dtype, width: int) -> tuple[Tensor, Tensor, Tensor, float]:
    """One layer's queries (the last `width` positions), keys, values and scale, at random."""
    config = model.config
    dim = config.hidden_size // config.num_attention_heads
    query = torch.randn(1, config.num_attention_heads, KEYS, dim).to(dtype)
    key, value = (torch.randn(1, config.num_key_value_heads, KEYS, dim).to(dtype) for _ in range(2))
    return query[:, :, -width:].contiguous(), key, value, dim**-0.5


def unequal_attention(model: PreTrainedModel, dtype: torch.dtype, way: Way) -> float:
    """Share of values that differ between the attention of all positions and that of each alone."""
    query, key, value, scale = layer(model, dtype, KEYS)
    whole = way.attend(query, key, value, scale)
    alone = [
        way.attend(query[:, :, end - 1 : end], key[:, :, :end], value[:, :, :end], scale) for end in range(1, KEYS + 1)
    ]
    return float((torch.cat(alone, dim=1) != whole).float().mean())


def times(model: PreTrainedModel, dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    """Each way's attention of one token over 150 keys, against the plain one."""
    parts = layer(model, dtype, 1)

    def work(way: Way) -> Callable[[], float]:
        return lambda: record.seconds(lambda: [way.attend(*parts) for _ in range(200)])

    taken = record.interleaved({name: work(way) for name, way in WAYS.items()}, repeats=repeats)
    return {
        name: record.spread(each / plain for each, plain in zip(values, taken["plain"], strict=True))
        for name, values in taken.items()
    }


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = record.options(__doc__, repeats=20)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--answers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=40)
    arguments = parser.parse_args(words)
    record.set_threads(arguments.threads)
    start = record.environment()
    torch.manual_seed(arguments.seed)
    policy = PolicySource(compose("smollm2").model.path, dtype=arguments.dtype).load()
    model, dtype = policy.model.eval(), DTYPES[arguments.dtype]
    texts = answers(policy, arguments.answers, arguments.tokens)
    rows = []
    model.config._attn_implementation = NAME
    with torch.inference_mode():
        taken = times(model, dtype, arguments.repeats)
        for name, way in WAYS.items():
            differences = (
                (token_by_token(model, way, *texts) - in_one_pass(model, way, *texts)).abs().flatten().tolist()
            )
            rows.append(
                {
                    "attention": name,
                    "mean_nats": statistics.mean(differences),
                    "max_nats": max(differences),
                    "equal": sum(each == 0 for each in differences) / len(differences),
                    "unequal_attention": unequal_attention(model, dtype, way),
                    "time": taken[name],
                }
            )
    unequal = unequal_products(model, dtype)
    return record.finish("rounding", __doc__, arguments, rows=rows, start=start, unequal_products=unequal)


if __name__ == "__main__":
    main()
