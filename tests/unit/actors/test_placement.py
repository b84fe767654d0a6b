"""Which bundles find a place on which nodes, and the message of a run that Ray did not place."""

import pytest

from rlpipe.actors import placement
from rlpipe.actors.placement import plan

pytestmark = pytest.mark.unit


def unplaced(bundles, nodes):
    """The bundles without a place; those with one fit the nodes they were given."""
    places = plan(bundles, nodes)
    for number, node in enumerate(nodes):
        for name in node:
            held = [b.get(name, 0) for b, place in zip(bundles, places, strict=True) if place == number]
            assert sum(held) <= node[name]
    return [bundle for bundle, place in zip(bundles, places, strict=True) if place is None]


def gpus(*sizes):
    return [{"CPU": size, "GPU": size} for size in sizes]


@pytest.mark.parametrize("nodes", range(2, 25))
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_servers_and_groups_that_divide_a_node_fill_any_number_of_nodes(nodes, size):
    fitting = gpus(*[size] * (8 // size * nodes))
    assert unplaced(fitting, gpus(*[8] * nodes)) == []
    assert unplaced([*fitting, *gpus(1)], gpus(*[8] * nodes)) == gpus(1)


def test_large_bundles_are_placed_first_so_small_ones_do_not_break_their_nodes():
    """8 servers of 4 and 16 ranks of 1 fill six nodes exactly, in whatever order they are named."""
    job = gpus(*[1] * 16, *[4] * 8)
    assert unplaced(job, gpus(*[8] * 6)) == []
    assert unplaced(job, gpus(*[8] * 5, 7)) == gpus(1)


@pytest.mark.parametrize(
    ("job", "nodes", "left"),
    [
        ((3, 3, 3), (8, 8), ()),
        ((3, 3, 3, 3, 3), (8, 8), (3,)),  # 15 of 16 GPUs, and no node has 3 left
        ((6, 2, 6, 2), (8, 8), ()),
        ((8,), (4, 4), (8,)),
        ((4, 4), (6, 2), (4,)),
    ],
)
def test_awkward_sizes(job, nodes, left):
    assert unplaced(gpus(*job), gpus(*nodes)) == gpus(*left)


def test_cpus_are_counted_too():
    assert unplaced([{"CPU": 2}, {"CPU": 2}], [{"CPU": 3, "GPU": 0}]) == [{"CPU": 2}]


def test_the_message_names_what_lacks_and_what_is_free():
    text = placement._missing(gpus(4, 4, 4, 1), gpus(6, 3))
    assert "no place for 2 x (4 CPUs, 4 GPUs)" in text
    assert "1 x (6 CPUs, 6 GPUs); 1 x (3 CPUs, 3 GPUs)" in text and "Lower rollout.sglang.tp" in text
