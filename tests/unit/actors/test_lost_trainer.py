"""A rollout worker that asks a dead trainer fails itself, and is not taken for dead."""

import asyncio

import pytest
from ray.exceptions import RayActorError, RayError

from rlpipe.actors.ray_cluster import _answer_of_trainer, _fetch_weights

pytestmark = pytest.mark.unit


async def dead():
    raise RayActorError()


async def alive():
    return "sent"


def test_the_death_of_the_trainer_is_not_the_workers():
    assert asyncio.run(_answer_of_trainer("does not answer", alive())) == "sent"
    for asked in (_answer_of_trainer("does not answer", dead()), _fetch_weights(None, 3, dead())):
        with pytest.raises(RuntimeError, match=r"the trainer does not (answer|give out version 3): ") as told:
            asyncio.run(asked)
        assert not isinstance(told.value, RayError) and told.value.__cause__ is None
