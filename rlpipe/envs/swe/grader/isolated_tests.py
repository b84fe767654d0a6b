"""Runs unittest ids in the sandbox of the tests, and reports which of them passed.

    {"nonce": N, "tests": [ids], "modules": {...}} on stdin, the code server's descriptor as argument

Decides which tests passed; uses only the standard library. Normally, the tests call the code under test
through `proxy`, and this process does not import it. The last line of the output is the nonce and a JSON
object {"passed": [ids], "intact": bool}; without that line, no test passed. Without a descriptor (an instance
with `graded_in_process`), this process imports the code. Only `intact` protects the result then: it is false
if the code changed the test functions. Code that searches this process for the nonce is not stopped.
"""

import marshal
import os
import sys

from rlpipe.envs.swe.grader import late

late.install("argparse", "difflib", "pprint", "signal", "traceback")  # two thirds of unittest's imports

import unittest  # noqa: E402
import unittest.case  # noqa: E402
import unittest.loader  # noqa: E402
import unittest.result  # noqa: E402
import unittest.suite  # noqa: E402

from rlpipe.envs.swe.grader import proxy  # noqa: E402
from rlpipe.envs.swe.grader.codec import dumps  # noqa: E402

_WATCHED = (
    unittest.case.TestCase,
    unittest.case._Outcome,
    unittest.loader.TestLoader,
    unittest.result.TestResult,
    unittest.suite.BaseTestSuite,
)


def machinery():
    """List every function that the tests rely on, with its code object, for a later comparison."""
    return [
        (cls.__name__, name, value, getattr(value, "__code__", None))
        for cls in _WATCHED
        for name, value in sorted(vars(cls).items())
        if callable(value) or isinstance(value, classmethod | staticmethod | property)
    ]


class MustFail(unittest.TestCase):
    """Tests with false assertions; each must be reported as a failure."""

    def test_equal(self):
        self.assertEqual(1, 2)

    def test_equal_lists(self):
        self.assertEqual([1], [2])

    def test_equal_texts(self):
        self.assertEqual("a", "b")

    def test_almost_equal(self):
        self.assertAlmostEqual(1.0, 2.0)

    def test_true(self):
        self.assertTrue(0)

    def test_false(self):
        self.assertFalse(1)

    def test_is_none(self):
        self.assertIsNone(0)

    def test_in(self):
        self.assertIn(1, [])

    def test_raises(self):
        with self.assertRaises(ValueError):
            pass

    def test_statement(self):
        raise AssertionError


class Result(unittest.result.TestResult):
    """A result that does not format failures, because nobody reads the text."""

    def _exc_info_to_string(self, err, test):
        return ""


def passes(test):
    """Run a test; return whether exactly this test ran and succeeded."""
    result = Result()
    test.run(result)
    return result.testsRun == 1 and result.wasSuccessful() and not (result.skipped or result.expectedFailures)


def same_machinery(before):
    """Return whether every function is unchanged since `machinery` returned `before`."""
    return [(a[:2], id(a[2]), id(a[3])) for a in before] == [(a[:2], id(a[2]), id(a[3])) for a in machinery()]


def finds_faults():
    """Return whether false assertions still fail."""
    names = [name for name in vars(MustFail) if name.startswith("test_")]
    return len(names) == 10 and not any(passes(MustFail(name)) for name in names)


def main():
    """Run the tests that stdin lists; print the nonce and the passed tests, and end the process."""
    order = marshal.load(sys.stdin.buffer)

    # The report goes to a copy of stdout that the tests and the code under test cannot write to.
    report = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)

    # With an argument, the code under test is in another process and is called through the proxy.
    before, isolated = machinery(), len(sys.argv) > 1
    if isolated:
        proxy.install(int(sys.argv[1]), order["modules"])
    sys.path.insert(0, os.getcwd())  # noqa: PTH109  (pathlib takes long to import)

    passed = []
    for name in order["tests"]:
        try:
            if passes(unittest.loader.TestLoader().loadTestsFromName(name)):
                passed.append(name)
        except BaseException:  # includes SystemExit on import: this test did not pass
            continue

    # In the same process, the code could have changed functions that the tests use.
    intact = same_machinery(before) and (isolated or finds_faults())
    line = b'{"passed": %b, "intact": %b}' % (dumps(passed), dumps(intact))
    with os.fdopen(report, "wb") as output:
        output.write(b"\n%b %b\n" % (order["nonce"].encode(), line))
    os._exit(0)
