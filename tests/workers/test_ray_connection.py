"""An actor that could never work ends the run with its reason; one that is gone is replaced."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from rhymerl.version import __version__
from rhymerl.workers.messages import Events
from rhymerl.workers.remote.ray import RayConnection

exceptions = pytest.importorskip("ray.exceptions")


class Asked:
    """What Ray gives for a call: it may be answered later."""

    def __init__(self) -> None:
        self.told: Future[object] = Future()

    def future(self) -> Future[object]:
        return self.told


class Actor:
    """Stands for Ray's handle of an actor with methods `home` and `poll`."""

    def __init__(self) -> None:
        self.home, self.poll = Method(), Method()


class Method:
    def __init__(self) -> None:
        self.asked = Asked()

    def options(self, **_: object) -> Method:
        return self

    def remote(self, *_: object) -> Asked:
        return self.asked


def test_an_actor_of_the_same_version_tells_what_is_new():
    actor = Actor()
    told = RayConnection(actor).poll(1.0)
    actor.home.asked.told.set_result(("here", __version__))
    assert not told.done()
    actor.poll.asked.told.set_result(Events(version=3))
    assert told.result().version == 3


def test_another_version_is_refused_though_the_question_is_never_answered():
    actor = Actor()
    told = RayConnection(actor).poll(1.0)
    actor.home.asked.told.set_result(("there", "0.0.9"))
    assert str(told.result().error).startswith("a worker on there has rhymerl 0.0.9; expected rhymerl ")


def test_an_answer_that_comes_after_the_refusal_is_the_refusal():
    actor = Actor()
    connection = RayConnection(actor)
    actor.home.asked.told.set_result(("there", "0.0.9"))
    told = connection.poll(1.0)
    actor.poll.asked.told.set_result(Events(version=3))
    assert told.result().error is not None


@pytest.mark.parametrize("error", ["made", "asked"])
def test_an_actor_that_cannot_be_made_tells_why(error):
    actor = Actor()
    told = RayConnection(actor).poll(1.0)
    reason = "in its creation task\nAttributeError: no attribute 'RayWorker'\n"
    actor.home.asked.told.set_exception(
        exceptions.RayActorError(error_msg=reason, actor_init_failed=True)
        if error == "made"
        else AttributeError("no attribute 'RayWorker'")
    )
    assert "a worker cannot work: " in str(told.result().error)
    assert "no attribute 'RayWorker'; expected" in str(told.result().error)


def test_an_actor_that_is_gone_is_nobodys_fault():
    actor = Actor()
    told = RayConnection(actor).poll(1.0)
    gone = exceptions.RayActorError()
    actor.home.asked.told.set_exception(gone)
    assert not told.done()
    actor.poll.asked.told.set_exception(gone)
    with pytest.raises(ConnectionError, match="its actor has ended"):
        told.result()
