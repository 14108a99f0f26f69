"""A drafter of one's own: guess that an answer goes on as an earlier answer to the same prompt did.

    cd examples
    rhymerl fit --config quickstart drafter=my_drafter.CopyEarlierAnswer

A wrong guess costs time and never changes a token, so there is nothing here to get subtly wrong. It follows the
history, which checkpoints hold: so it guesses as well after a resume as before.
"""

import numpy as np

from rhymerl import Draft, Drafter


class CopyEarlierAnswer(Drafter):
    """Proposes what followed the same `match` tokens in the latest answers; the best of a group has the last word."""

    def __init__(self, *, match: int = 4) -> None:
        self.match = match
        self._followed = {}

    def follow(self, delta):
        for change in delta:
            for answer in sorted(change.added, key=lambda answer: (answer.epoch, answer.reward)):
                tokens = np.append(change.prompt_token_ids, answer.token_ids)
                for end in range(self.match, len(tokens)):
                    self._followed[change.key, tokens[end - self.match : end].tobytes()] = tokens[end:]

    def propose(self, request, context, budget):
        guess = self._followed.get((request.prompt.key, context[-self.match :].tobytes()), context[:0])[:budget]
        return Draft(token_ids=guess, parents=np.arange(-1, len(guess) - 1, dtype=np.int32))
