"""Messages between ranks: every value comes back as it was, and whatever no rank has signed is not even read."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import rhymerl.distributed
from rhymerl.distributed.store_channel import StoreChannel
from rhymerl.distributed.wire import Wire
from rhymerl.errors import RunError
from rhymerl.rewards.failures import Failures
from rhymerl.rollout import RECORDS
from rhymerl.rollout.results import RankResult, ScoredOutput
from rhymerl.types import Output, Ratio

KEY = b"known to the ranks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    left: object
    right: object


WIRE = Wire([Pair, Ratio, *RECORDS], key=KEY)


def there_and_back(value):
    return WIRE.unpack(WIRE.pack(value, address="here"), address="here")


def same(left: object, right: object) -> bool:
    """Also of the same types, down to the dtypes; NaN is NaN."""
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray):
        return (left.dtype, left.shape) == (right.dtype, right.shape) and left.tobytes() == right.tobytes()
    if isinstance(left, Pair):
        return same(left.left, right.left) and same(left.right, right.right)
    if isinstance(left, Ratio):
        return same((left.part, left.whole), (right.part, right.whole))
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return same(list(left), list(right)) and same(list(left.values()), list(right.values()))
    return left == right or (isinstance(left, float) and math.isnan(left) and math.isnan(right))


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
arrays = st.builds(
    lambda values, dtype, shape: np.array(values, np.int64).astype(dtype).reshape(shape),
    st.lists(st.integers(0, 100), min_size=6, max_size=6),
    st.sampled_from(["int32", "int64", "float32", "float64", "bool", "uint8"]),
    st.sampled_from([(6,), (2, 3), (3, 1, 2)]),
) | st.sampled_from([np.empty(0, np.int32), np.array(3.5), np.arange(9)[::3]])
ratios = st.builds(Ratio, st.integers(0, 9), st.floats(0, 9))
values = st.recursive(
    scalars | arrays | ratios,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.builds(Pair, left=inner, right=inner)
        | st.lists(st.builds(Pair, left=inner, right=inner), min_size=2)
        | st.lists(arrays, min_size=2)
        | st.lists(st.fixed_dictionaries({"a": inner, "b": inner}), min_size=2)
    ),
    max_leaves=25,
)


@given(values)
def test_every_value_comes_back_as_it_was(value):
    assert same(there_and_back(value), value)


def test_a_share_of_a_step_comes_back_as_it_was():
    def scored(index: int) -> ScoredOutput:
        tokens = np.arange(index, dtype=np.int32)
        output = Output(
            token_ids=tokens,
            logprobs=-tokens / 7,
            policy_versions=np.full(index, 3, np.int32),
            finish_reason="stop",
            num_passes=2,
            num_drafted=3,
            num_accepted=1,
            sources=np.full(index, -2, np.int8) if index % 2 else None,
        )
        return ScoredOutput(index=index, output=output, text=f"\ud800 {index}", rewards={"a": index / 3, "b": math.nan})

    share = RankResult(
        scored=[scored(index) for index in range(5)],
        metrics={"x": Ratio(1, 3), "y": 2},
        busy_s=1.5,
        rollout_s=2.0,
        failures=Failures(num_samples=5, num_failed={"a": 2}, first={"a": "KeyError: 'b'"}),
    )
    found = there_and_back(share)
    assert replace(found, scored=()).metrics == share.metrics
    assert found.failures == share.failures
    assert (found.metrics["x"].part, found.metrics["x"].whole) == (1, 3)
    for one, other in zip(found.scored, share.scored, strict=True):
        assert (one.index, one.text, list(one.rewards)) == (other.index, other.text, ["a", "b"])
        assert (one.rewards["a"], one.output.finish_reason) == (other.rewards["a"], "stop")
        assert (one.output.sources is None) == (one.index % 2 == 0)
        assert one.output.sources is None or same(one.output.sources, other.output.sources)
        for name in ("token_ids", "logprobs", "policy_versions"):
            assert same(getattr(one.output, name), getattr(other.output, name))
            assert getattr(one.output, name).flags.writeable


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, b"bytes", np.array(["text"]), np.array([object()]), [Path("a")], {"a": print}, Exception("x")],
    ids=lambda value: type(value).__name__,
)
def test_what_does_not_travel_is_named(value):
    with pytest.raises(TypeError, match="does not travel between ranks"):
        WIRE.pack(value, address="here")


def test_a_record_that_the_other_side_does_not_know_is_named():
    message = WIRE.pack(Pair(left=1, right=2), address="here")
    with pytest.raises(RunError, match="has a 'Pair', which this rank does not know"):
        Wire(key=KEY).unpack(message, address="here")


MESSAGE = WIRE.pack({"a": [1, 2.5, "x"], "b": np.arange(5)}, address="here")


@given(st.integers(0, 8 * len(MESSAGE) - 1))
def test_one_bit_that_is_changed_is_noticed(bit):
    message = bytearray(MESSAGE)
    message[bit // 8] ^= 1 << bit % 8
    with pytest.raises(RunError, match="no rank of this run has signed"):
        WIRE.unpack(message, address="here")


@given(st.binary(max_size=300) | st.integers(0, len(MESSAGE) - 1).map(MESSAGE.__getitem__).map(lambda n: bytes([n])))
def test_bytes_of_strangers_are_not_read(content):
    with pytest.raises(RunError, match="no rank of this run has signed"):
        WIRE.unpack(content, address="here")


def test_a_message_is_good_in_its_own_place_and_under_its_own_key_only():
    with pytest.raises(RunError, match=r"signed \(there\)"):
        WIRE.unpack(MESSAGE, address="there")
    with pytest.raises(RunError, match="no rank of this run has signed"):
        Wire([Pair], key=b"of another run").unpack(MESSAGE, address="here")


class Bomb:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("key", ["channel/1/reports", "channel/1/commands", "channel/1/messages/0"])
def test_what_a_stranger_puts_into_the_store_is_not_executed(key, tmp_path):
    from contextlib import nullcontext

    bomb = pickle.dumps(Bomb(tmp_path / "went off"))
    store = dist.HashStore()
    store.add(f"{key}/count", 1)
    store.set(f"{key}/0", bomb)
    channel = StoreChannel(store, "channel/1", wire=WIRE, rank=0, size=2, collective=nullcontext)
    with pytest.raises(RunError, match="another process writes to the ranks' store"):
        channel.exchange(None, [], lambda reports: None, waits=False)
    assert not (tmp_path / "went off").exists()
    pickle.loads(bomb)
    assert (tmp_path / "went off").exists()


def test_nothing_between_ranks_is_a_pickle():
    folder = Path(rhymerl.distributed.__file__).parent
    for path in [*folder.glob("*.py"), *folder.parent.glob("rollout/*.py")]:
        assert "pickle" not in path.read_text(), path
        assert "_object" not in path.read_text(), path
    code = "import rhymerl.distributed.wire, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
