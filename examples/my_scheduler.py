"""A scheduler of one's own: the longest of last time starts first, so that no long answer begins at the end.

cd examples
rhymerl fit --config quickstart scheduler=my_scheduler.LongestFirst
"""

from rhymerl import Scheduler


class LongestFirst(Scheduler):
    """Orders prompts by the length of their last answer, longest first; new prompts go before all others."""

    def __init__(self) -> None:
        self._lengths = {}

    def plan(self, requests, num_workers, step):
        queue = sorted(requests, key=lambda request: -self._lengths.get(request.prompt.key, 1_000_000))
        return [queue[worker::num_workers] for worker in range(num_workers)]

    def learn(self, samples):
        self._lengths.update({sample.prompt.key: len(sample) for sample in samples})

    def state_dict(self):
        return {"lengths": dict(self._lengths)}

    def load_state_dict(self, state):
        self._lengths = dict(state["lengths"])
