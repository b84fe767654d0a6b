"""Command lines: settings and options in any order."""

import pytest
from hydra._internal.utils import get_args_parser

from rlpipe.cli.hydra_errors import check_arguments, settings_first

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    "line",
    [
        "--multirun +recipe=swe_rl run.seed=0,1",
        "+recipe=swe_rl --multirun run.seed=0,1",
        "+recipe=swe_rl run.seed=0,1 --multirun",
        "+recipe=swe_rl -m run.seed=0,1 --config-dir .",
    ],
)
def test_settings_may_stand_on_both_sides_of_an_option(line):
    ordered = settings_first(line.split())
    given, unknown = get_args_parser().parse_known_args(ordered)
    assert given.multirun and given.overrides == ["+recipe=swe_rl", "run.seed=0,1"] and not unknown
    check_arguments(ordered)


def test_the_value_of_an_option_stays_behind_it():
    line = "+recipe=mine --config-dir a=b ~x --cfg job spec.mode=none"
    ordered = settings_first(line.split())
    assert " ".join(ordered) == "+recipe=mine ~x spec.mode=none --config-dir a=b --cfg job"
