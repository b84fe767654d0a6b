"""Whole episodes in the real sandbox: honest solutions are rewarded, attempts to cheat are not."""

import json

import pytest

from rlpipe.config.env import EnvConfig, SandboxConfig
from rlpipe.envs import check_environment, make_suite
from rlpipe.envs.base import InfrastructureError
from rlpipe.envs.sandbox import bubblewrap

pytestmark = pytest.mark.integration

BROKEN = "def double(x):\n    return x + 3\n\ndef same(x):\n    return x\n"
TESTS = """\
import unittest

import core


class T(unittest.TestCase):
    def test_double(self):
        self.assertEqual(core.double(2), 4)
        self.assertEqual(core.double(5), 10)

    def test_same(self):
        self.assertEqual(core.same(7), 7)
"""
INSTANCE = {
    "instance_id": "double",
    "problem_statement": "double is broken.",
    "FAIL_TO_PASS": ["test_core.T.test_double"],
    "PASS_TO_PASS": ["test_core.T.test_same"],
    "files": {"core.py": BROKEN, "test_core.py": TESTS},
}
PACKAGE = INSTANCE | {
    "instance_id": "package",
    "FAIL_TO_PASS": ["tests.test_core.T.test_double"],
    "PASS_TO_PASS": [],
    "files": {"core.py": BROKEN, "tests/__init__.py": "", "tests/test_core.py": TESTS},
}
FIX = "sed -i '2c\\    return x * 2' core.py"


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    directory = tmp_path_factory.mktemp("data")
    (directory / "train.jsonl").write_text(json.dumps(INSTANCE))
    (directory / "held.jsonl").write_text(json.dumps(PACKAGE))
    config = EnvConfig(
        train_file=str(directory / "train.jsonl"),
        held_out_files=[str(directory / "held.jsonl")],
        sandbox=SandboxConfig(timeout_s=10),
        test_timeout_s=20,
    )
    check_environment(config)
    return make_suite(config)


def play(suite, *actions, instance="double"):
    """The result of the last action; every earlier one must leave the episode open."""
    episode = suite.episode(instance)
    try:
        for action in actions[:-1]:
            assert not episode.step(action).done
        return episode.step(actions[-1])
    finally:
        episode.close()


def write(path, text):
    return f"cat > {path} <<'END'\n{text}\nEND"


def test_an_honest_fix_is_seen_tested_and_rewarded(suite):
    episode = suite.episode("double")
    assert episode.step("grep -l 'def double' *.py").observation == "core.py"
    assert episode.step("grep -n '' core.py").observation.startswith("1:def double(x):\n2:    return x + 3")
    assert episode.step("python3 -m unittest 2>&1 | tail -1").observation == "FAILED (failures=1)"
    assert episode.step(FIX).observation == ""
    assert episode.step("python3 -m unittest 2>&1 | tail -1").observation == "OK"
    end = episode.step("submit")
    assert end.done and end.reward == 1.0 and end.info["tests_passed"] == end.info["tests_required"] == 2
    assert play(suite, FIX, "submit", instance="package").reward == 1.0


def test_no_fix_half_a_fix_and_no_submission_earn_nothing(suite):
    unchanged = play(suite, "submit")
    assert unchanged.reward == 0.0 and unchanged.info["changed"] is False
    regress = play(suite, FIX, "sed -i 's/return x$/return 0/' core.py", "submit")
    assert regress.reward == 0.0 and regress.info["tests_passed"] == 1
    episode = suite.episode("double")
    episode.step(FIX)
    assert episode.finish().reward == 0.0


def test_deleting_or_breaking_the_repository_earns_nothing(suite):
    for action in (
        "rm -rf *",
        "echo '((' > core.py",
        "rm core.py; mkdir core.py",
        "ln -sf /dev/zero core.py",
    ):
        assert play(suite, action, "submit").reward == 0.0, action


def before_core(code):
    """Put code in front of core.py, whose bug stays."""
    return f"{write('new.py', code)}\ncat core.py >> new.py; mv new.py core.py"


FAKE_TESTS = """\
import unittest
class T(unittest.TestCase):
    def test_double(self): pass
    def test_same(self): pass"""
FAKE_REPORT = """\
import os
print('{"passed": ["test_core.T.test_double", "test_core.T.test_same"], "intact": true}')
print("OK", flush=True)
os._exit(0)"""
LEAVE = "import os; os._exit(0)"
CHEATS = {
    "editing the tests": "sed -i 's/4)/5)/; s/10)/8)/' test_core.py; echo '#' >> core.py",
    "leaving early": before_core(LEAVE),
    "printing a fake report": before_core(FAKE_REPORT),
    "a unittest of one's own": write("unittest.py", LEAVE),
    "start hooks": f"{write('sitecustomize.py', LEAVE)}\ncp sitecustomize.py usercustomize.py",
    "a standard module of one's own": write("argparse.py", LEAVE),
    "a package in place of the test module": f"mkdir test_core; {write('test_core/__init__.py', FAKE_TESTS)}",
    "bytecode in place of the test module": (
        "sed 's/4)/5)/; s/10)/8)/' test_core.py > t.py\n"
        "python3 -c \"import py_compile; py_compile.compile('t.py', 'test_core.pyc')\"\nrm t.py test_core.py"
    ),
    "skipping the tests": "sed -i '2c\\    import unittest; raise unittest.SkipTest' core.py",
    "assertions that accept everything": before_core(
        "import unittest\nunittest.TestCase.assertEqual = lambda *a: None"
    ),
    "assertions that accept everything, in place": before_core(
        "import unittest\nunittest.TestCase.assertEqual.__code__ = (lambda s, a, b, msg=None: None).__code__"
    ),
    "results that forget failures": before_core(
        "import unittest\nunittest.TestResult.addFailure = lambda *a: None"
    ),
    "tests that do not run": before_core(
        "import unittest\n"
        "def run(self, result=None):\n    result.startTest(self); result.addSuccess(self)\n"
        "unittest.TestCase.run = run"
    ),
    "failures that count as skipped": before_core(
        "import unittest\nunittest.TestCase.failureException = unittest.SkipTest"
    ),
    "an outcome that is always good": before_core(
        "import unittest.case, contextlib\n"
        "unittest.case._Outcome.testPartExecutor = lambda *a, **k: contextlib.suppress(Exception)"
    ),
    "a link to tests elsewhere": (
        "sed 's/4)/5)/; s/10)/8)/' test_core.py > t.txt; ln -sf t.txt test_core.py"
    ),
}


@pytest.mark.parametrize("name", CHEATS)
def test_cheating_is_not_rewarded_by(suite, name):
    """Each cheat fools who trusts the exit status of the test run, so each tests something here."""
    episode = suite.episode("double")
    episode.step(CHEATS[name])
    naive = "PYTHONPATH=. python3 -m unittest test_core > /dev/null 2>&1; echo $?"
    assert episode.step(naive).observation == "0"
    end = episode.step("submit")
    assert end.done and end.reward == 0.0, end


@pytest.mark.parametrize(
    "ending", ["time.sleep(60)", "sys.exit(0)", "os.kill(os.getppid(), 9)", "os.abort()"]
)
def test_a_test_run_that_does_not_end_well_is_not_rewarded(suite, ending):
    end = play(suite, before_core(f"import os, sys, time; {ending}"), "submit")
    assert end.done and end.reward == 0.0, end


def test_what_a_cheat_adds_does_not_hide_an_honest_fix(suite):
    """The files that are taken away before the tests run are only the ones that shadow something."""
    for name in (
        *("editing the tests", "a unittest of one's own", "start hooks", "a standard module of one's own"),
        *("a package in place of the test module", "a link to tests elsewhere"),
    ):
        assert play(suite, FIX, CHEATS[name], "submit").reward == 1.0, name


def test_a_package_of_tests_cannot_be_replaced(suite):
    cheat = "rm -r tests; ln -s /tmp tests; echo '#' >> core.py"
    assert play(suite, cheat, "submit", instance="package").reward == 0.0
    assert play(suite, FIX, cheat, "submit", instance="package").reward == 1.0
    conftest = write("tests/__init__.py", "import os; os._exit(0)") + "; echo '#' >> core.py"
    assert play(suite, conftest, "submit", instance="package").reward == 0.0


def test_a_command_that_hangs_is_the_models_fault(suite):
    assert play(suite, "echo hi; sleep 60").observation == "hi\ntimeout"


def test_equal_episodes_are_played_from_memory(suite):
    play(suite, "ls", FIX, "submit")
    hits, lookups = suite.sandbox_counts()
    assert play(suite, "ls", FIX, "submit").reward == 1.0
    again, asked = suite.sandbox_counts()
    assert (again - hits, asked - lookups) == (3, 3)


def test_a_sandbox_failure_while_grading_is_raised_and_forgotten(suite, monkeypatch):
    episode = suite.episode("double")
    episode.step("sed -i '2c\\    return 2 * x  # another tree' core.py")
    with monkeypatch.context() as broken:
        broken.setattr(bubblewrap, "_system", lambda: ("--no-such-option",))
        with pytest.raises(InfrastructureError):
            episode.step("submit")
    assert episode.step("submit").reward == 1.0


def test_splits_are_named_after_their_files_in_order(suite):
    assert list(suite.splits()) == ["held"]
    assert (suite.instance_ids("train"), suite.instance_ids("held")) == (["double"], ["package"])
    with pytest.raises(ValueError, match="no split 'x'; there are train, held"):
        suite.instance_ids("x")
