"""The verifiers of reasoning-gym as a reward, in the sandbox: some of them evaluate the answer as Python."""

from __future__ import annotations

import sysconfig
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rhymerl.errors import require_package
from rhymerl.rewards.arguments import check_argument
from rhymerl.rewards.hooks import brings
from rhymerl.rewards.walls import check_sandbox

if TYPE_CHECKING:
    from rhymerl.rewards.base import Reward
    from rhymerl.rewards.sandbox.run import Sandbox, Wall

_MIN_MEMORY_MB = 512  # the package and what it imports need half of it
_VERIFIER = "sandbox.verifier"  # as the warm process knows it


def check_verifiers(reward: Reward) -> None:
    """Raises ConfigError when the package is missing, and where there is no sandbox for it."""
    require_package("reasoning_gym", reward.setting)
    check_argument(reward, "unsafe_unconfined", lambda value: isinstance(value, bool), "true or false")
    if not reward.arguments.get("unsafe_unconfined", False):
        check_sandbox(reward, time_limit_s=8.0, min_memory_mb=_MIN_MEMORY_MB)


def open_verifiers(arguments: Mapping[str, Any]) -> AbstractContextManager[Sandbox | None]:
    """Return a sandbox in which the package has been imported, unless the arguments want none."""
    from rhymerl.rewards.sandbox.run import Sandbox

    if arguments.get("unsafe_unconfined", False):
        return nullcontext()
    return Sandbox(folders=_folders(), modules=[_VERIFIER])


@brings(check=check_verifiers, opens={"sandbox": open_verifiers})
def reasoning_gym_reward(
    completion: str,
    *,
    entry: str,
    time_limit_s: float = 8.0,
    memory_mb: int = 1024,
    unsafe_without: Sequence[Wall] = (),
    unsafe_unconfined: bool = False,
    sandbox: Sandbox | None = None,
    **columns: Any,
) -> float:
    """Return the verifier's score of the answer in a completion, 0 to 1; `entry` is the row's column of that name.

    An answer that the verifier cannot even parse scores 0. Data sets that read large files (arc_agi, codeio) take up to
    half a second a call. With `unsafe_unconfined` the verifier runs in this process, not in a sandbox. Raises
    RuntimeError for one that raises or does not come to an end within its limits, and SandboxError where no sandbox can
    be had.
    """
    if unsafe_unconfined:
        return float(import_module("rhymerl.rewards.sandbox.verifier").score(completion, entry))
    from rhymerl.rewards.sandbox.run import Job

    job = Job(
        code=f"from {_VERIFIER} import score",
        tests=[{"input": [completion, entry]}],
        entry_point="score",
        time_limit_s=time_limit_s,
        memory_mb=memory_mb,
        folders=_folders(),
        unsafe_without=unsafe_without,
    )
    with open_verifiers({}) if sandbox is None else nullcontext(sandbox) as opened:
        assert opened is not None, "it is wanted"
        report = opened.run(job)
    if not report.values:
        raise RuntimeError(f"the verifier gave no score: {report.failure}")
    return float(report.values[0])


def _folders() -> list[str]:
    """Return the folders of the package and its dependencies."""
    spec = find_spec("reasoning_gym")
    found = [str(Path(folder).parent) for folder in (spec.submodule_search_locations or [] if spec else [])]
    return sorted({*found, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
