"""An OpenEnv server for tests that counts down to 0 from a number by the seed: 2 takes two, anything else one."""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from openenv.core import Action, Environment, Observation, State, create_fastapi_app


class Take(Action):
    count: str


class Left(Observation):
    left: str = ""


class Countdown(Environment[Take, Left, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._left = 0
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Left:
        self._left = 3 + (seed or 0) % 7
        return self._observed(0.0)

    def step(self, action: Take, timeout_s: float | None = None, **kwargs: Any) -> Left:
        self._left -= 2 if action.count == "2" else 1
        return self._observed(float(self._left == 0))

    def _observed(self, reward: float) -> Left:
        return Left(left=f"{self._left}=", done=self._left <= 0, reward=reward)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    app = create_fastapi_app(Countdown, Take, Left, max_concurrent_envs=16)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
