"""A server that nobody here wrote is certified: `transformers serve`, which takes and returns text only."""

import json

import pytest

from rlpipe.cli.certify import main
from rlpipe.config.paths import shipped
from tests.helpers.certified import transformers_server
from tests.helpers.sglang import needs_sglang

pytestmark = pytest.mark.integration
SAMPLING = {"generation_config": json.dumps({"do_sample": True, "top_k": 0})}
NOT_JUDGED = {"later tokens", "acceptance", "log-probabilities"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """URL and checkpoint."""
    needs_sglang()
    with transformers_server(shipped("models/tiny"), tmp_path_factory.mktemp("served")) as served:
        yield served


def certify(server, folder, *options):
    """Exit status and JSON of a certificate, and its page."""
    url, path = map(str, server)
    out, page = folder / "certificate.json", folder / "certificate.html"
    status = main([url, "--model", path, "--name", path, "--json", str(out), "--out", str(page), *options])
    return status, json.loads(out.read_text()), page.read_text()


def test_with_sampling_on_its_first_tokens_are_right_and_the_rest_is_said_to_be_left(server, tmp_path):
    status, found, page = certify(server, tmp_path, "--samples", "200", "--body", json.dumps(SAMPLING))
    assert status == 0, found["summary"]
    assert {line["name"] for line in found["lines"] if line["passed"] is None} == NOT_JUDGED
    assert "not judged: the server returns no token ids" in page


def test_by_default_it_does_not_sample_and_the_certificate_says_so(server, tmp_path):
    """transformers 5 decodes greedily at any temperature unless generation_config has do_sample."""
    status, found, _ = certify(server, tmp_path, "--samples", "100")
    assert status == 1
    assert [cause["name"] for cause in found["causes"]] == ["no sampling"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--samples", "5"], "take at least 100"),
        (["--alpha", "2"], "choose 0.01"),
        (["--dtype", "int4"], "choose float32"),
        (["--tokens", "-1"], "is negative"),
    ],
)
def test_values_that_make_no_certificate_are_refused_at_once(options, message, capsys):
    assert main(["http://127.0.0.1:9", "--model", "shipped:models/tiny", *options]) == 2
    assert message in capsys.readouterr().err
