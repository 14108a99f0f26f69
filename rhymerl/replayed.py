"""What an update does as sampling did it: choose among the tokens that truncation left, by the same experts.

Arrays are read-only by convention. numpy is imported when first used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# [tokens, layers, k] 1 + the number of each expert that computed a token; 0 where that is not known.
RouteArray: TypeAlias = "npt.NDArray[np.integer[Any]]"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSets:
    """The ids that truncation has left at each token, [L] sets: 12 bytes a token, and 4 more for each id of its set."""

    counts: npt.NDArray[np.int32]  # [L]; 0 = the whole vocabulary
    token_ids: npt.NDArray[np.int32]  # [sum of counts], one set after another
    log_masses: npt.NDArray[np.float64]  # [L] log of the probability that the whole policy gave to the set

    @classmethod
    def of(cls, sets: Sequence[npt.NDArray[np.int32]], log_masses: npt.ArrayLike) -> KeptSets:
        """Return the sets of some tokens; an empty one is the whole vocabulary."""
        import numpy as np

        counts, masses = np.array([len(each) for each in sets], np.int32), np.asarray(log_masses, np.float64)
        return cls(counts=counts, token_ids=np.concatenate([np.empty(0, np.int32), *sets]), log_masses=masses)

    @property
    def sets(self) -> list[npt.NDArray[np.int32]]:
        """Return the ids of each token."""
        import numpy as np

        return np.split(self.token_ids, np.cumsum(self.counts)[:-1]) if len(self) else []

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, part: slice) -> KeptSets:
        return KeptSets.of(self.sets[part], self.log_masses[part])


def last_routes(routes: RouteArray, count: int) -> RouteArray:
    """Return the routes of so many last tokens; of those in front of the first nothing is known."""
    import numpy as np

    missing = count - len(routes)
    return routes[-missing:] if missing <= 0 else np.pad(routes, ((missing, 0), (0, 0), (0, 0)))


def routes_behind(earlier: RouteArray | None, own: RouteArray | None, num_own: int) -> RouteArray | None:
    """Return the routes of an answer and of `num_own` tokens behind it.

    Of these there may be more: those of their prompt, which then are the last of the earlier tokens.
    """
    import numpy as np

    like = earlier if own is None else own
    if like is None:
        return None
    before = like[:0] if earlier is None else earlier
    own = np.zeros((num_own, *like.shape[1:]), like.dtype) if own is None else own
    return np.concatenate([before[: max(len(before) + num_own - len(own), 0)], own])
