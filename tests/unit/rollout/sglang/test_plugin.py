"""rlpipe's plugin of SGLang without a server: entropies, their tokens, packing, and its report."""

import importlib
import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.spec import SpecConfig
from rlpipe.rollout.sglang.answers import parse_answer
from rlpipe.rollout.sglang.arguments import check_server_info
from rlpipe.types import GenerateRequest, SamplingParams
from rlpipe.weights.protocols import ServerError
from tests.helpers.cli import ROOT
from tests.unit.rollout.sglang.test_server_launch import GOOD

pytestmark = pytest.mark.unit
VOCAB = 11


def module(monkeypatch, name, **content):
    made = ModuleType(name)
    made.__dict__.update(content)
    monkeypatch.setitem(sys.modules, name, made)
    return made


@pytest.fixture
def plugin(monkeypatch):
    """The plugin's modules, with the few names of SGLang that they import."""
    for name in [name for name in sys.modules if name.startswith("rlpipe_sglang")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(ROOT / "sglang_env" / "plugin"))
    for parent in ("", ".srt", ".srt.managers", ".srt.plugins"):
        module(monkeypatch, f"sglang{parent}", __path__=[])
    original = SimpleNamespace(get=lambda: False)
    module(monkeypatch, "sglang.srt.environ", envs=SimpleNamespace(SGLANG_RETURN_ORIGINAL_LOGPROB=original))
    joined = {"append_auxiliary_output": lambda known, new: [*(known or []), new]}
    module(monkeypatch, "sglang.srt.managers.auxiliary_output", **joined)
    yield importlib.import_module
    for name in [name for name in sys.modules if name.startswith("rlpipe_sglang")]:
        del sys.modules[name]


def exact(logits):
    """Log-probabilities and entropies in double precision."""
    logprobs = logits.double().log_softmax(-1)
    return logprobs, -(logprobs.exp() * logprobs.nan_to_num(neginf=0.0)).sum(-1)


def test_a_verify_steps_tokens_have_the_law_of_the_row_they_were_drawn_from(plugin):
    """Two requests of three places; one keeps two drafts, the other none: -1 marks places behind the last."""
    measure = plugin("rlpipe_sglang.measure")
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(0)) * 4
    logits[1, 3] = float("-inf")
    sampling = SimpleNamespace(is_all_greedy=False, temperatures=torch.tensor([[0.5], [2.0]]))
    batch = SimpleNamespace(sampling_info=sampling, top_logprobs_nums=[0, 0], token_ids_logprobs=[None, None])
    output = SimpleNamespace(next_token_logits=logits, auxiliary_device_output=None)
    predict = torch.tensor([4, 5, 6, 7, 8, 9], dtype=torch.int32)
    index = torch.tensor([[0, 1, 2], [3, -1, -1]], dtype=torch.int32)
    measure.verified(None, batch, output, predict, accept_index=index)

    (entropies,) = output.auxiliary_device_output
    for request, place, row, temperature in ((0, 0, 0, 0.5), (0, 1, 1, 0.5), (0, 2, 2, 0.5), (1, 0, 3, 2.0)):
        logprobs, entropy = exact(logits[row] / temperature)
        assert entropies.values[request, place].item() == pytest.approx(entropy.item(), abs=1e-5)
        found = output.next_token_logprobs[request, place].item()
        assert found == pytest.approx(logprobs[predict[row]].item(), abs=1e-5)


def test_one_token_a_request_is_measured_where_sglang_normalises(plugin):
    measure = plugin("rlpipe_sglang.measure")
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    result, output = SimpleNamespace(), SimpleNamespace(auxiliary_device_output=None)
    measure.written(None, result, output)
    assert output.auxiliary_device_output is None  # of a draft's or a scoring pass
    measure.sampled(result, None, logits.log_softmax(-1), [], [], None)
    measure.written(None, result, output)
    torch.testing.assert_close(output.auxiliary_device_output[0].values.double(), exact(logits)[1])


def committed(index, count):
    return SimpleNamespace(output_index=index, token_ids=(7,) * count)


def test_a_request_is_given_the_entropies_of_the_tokens_it_keeps(plugin):
    """Drafts behind a stop token, chunks of a prompt and requests without logprobs are given none."""
    measure = plugin("rlpipe_sglang.measure")
    asked = [SimpleNamespace(return_logprob=i != 2, customized_info=None) for i in range(4)]
    first = measure.Entropies(torch.tensor([0.5, 1.0, 1.5, 2.0])).copy_to_host(lambda tensor: tensor.clone())
    first.consume(SimpleNamespace(reqs=asked), [committed(0, 1), committed(0, 1), committed(0, 1), None])
    verify = measure.Entropies(torch.tensor([[3.0, 4.0, 5.0], [6.0, 7.0, 8.0]]))
    verify.consume(SimpleNamespace(reqs=asked[:2]), [committed(1, 2), committed(1, 3)])
    assert [one.customized_info and one.customized_info[measure.KEY] for one in asked] == [
        [0.5, 3.0, 4.0],
        [1.0, 6.0, 7.0, 8.0],
        None,
        None,
    ]


REQUEST = GenerateRequest(request_id="r", prompt_ids=[5], sampling=SamplingParams(top_logprobs=2))
RECORDED = {
    "finish_reason": None,
    "weight_version": "3",
    "output_token_logprobs": [[-9.0, 7, None]] * 3,
    "output_top_logprobs": [[[-9.0, 7, None]]] * 3,
}


@pytest.fixture
def server(plugin):
    """Packs what a scheduler sends, part by part; gives the answer as a client reads it."""
    pack, key = plugin("rlpipe_sglang.pack"), plugin("rlpipe_sglang.measure").KEY

    class Server:
        state = SimpleNamespace(input_token_logprobs_val=[], output_token_logprobs_val=[])
        top_values, top_ids, ids = [], [], []

        def send(self, logprobs, entropies, named=None):
            state = self.state
            for name, rows in (
                ("output_token_logprobs_val", list(logprobs)),
                ("output_top_logprobs_val", [[value, value - 1] for value in logprobs]),
                ("output_top_logprobs_idx", [[7, 8] for _ in logprobs]),
            ):
                state.__dict__[name] = getattr(state, name, []) + rows
            self.ids = self.ids + [7] * len(logprobs)

            def stock(manager, meta, *_, **__):
                meta |= {name: RECORDED[name] for name in RECORDED if name.startswith("output")}

            meta = {"finish_reason": None, "weight_version": "3"}
            pack.packed(stock, None, meta, state, 2, named, False, finished=False)
            if entropies is not None:
                info = {key: [[0.0], entropies], "other": [[1], [2]]}
                seen = []
                pack.noted(lambda *given: seen.append(given[3]), None, meta, state, info, 1, None)
                assert seen == [{"other": [[1], [2]]}]
            return json.loads(json.dumps({"output_ids": self.ids, "meta_info": meta}))

    return Server()


def test_packed_numbers_of_a_growing_turn_are_read_back(server):
    first = parse_answer(REQUEST, server.send([-0.5], [1.25]))
    assert (first.logprobs.tolist(), first.entropies.tolist(), first.top_logprobs) == (
        [-0.5],
        [1.25],
        [[(7, -0.5), (8, -1.5)]],
    )
    answer = server.send([-2.0, -0.25], [0.5, 2.5])
    assert "output_token_logprobs" not in answer["meta_info"]
    whole = parse_answer(REQUEST, answer)
    assert whole.logprobs.tolist() == [-0.5, -2.0, -0.25] and whole.entropies.tolist() == [1.25, 0.5, 2.5]
    assert whole.top_logprobs == [[(7, v), (8, v - 1)] for v in whole.logprobs.tolist()]
    again = parse_answer(REQUEST, server.send([], None))  # an abort that brings no token
    assert again.entropies.tolist() == whole.entropies.tolist()


@pytest.mark.parametrize("entropies", [None, [1.0], [1.0, None]])
def test_tokens_without_entropy_are_refused(server, entropies):
    with pytest.raises(ServerError, match=r"2 output ids came with [01] entropies"):
        parse_answer(REQUEST, server.send([-0.5, -1.0], entropies))


def test_a_request_that_names_tokens_is_answered_by_sglang(server):
    meta = server.send([-0.5], None, named=[4])["meta_info"]
    assert "rlpipe" not in meta and meta["output_token_logprobs"] == RECORDED["output_token_logprobs"]


def known(value):
    return value + 1


@pytest.fixture
def loaded(plugin, monkeypatch):
    """Load the plugin into a process whose table is one function of this file; gives report and hooks."""
    hooked = {}
    registry = SimpleNamespace(register=lambda target, hook, kind: hooked.setdefault(target, (hook, kind)))
    content = {"HookRegistry": registry, "HookType": str}
    module(monkeypatch, "sglang.srt.plugins.hook_registry", **content)
    module(monkeypatch, "sglang.srt.place", known=known)

    def load(source):
        entry = plugin("rlpipe_sglang.plugin")
        hook = entry.Hook("http", "place:known", "", plugin("rlpipe_sglang.pack").packed)
        source = source or entry.digest(hook)
        told = entry.Hook("http", "place:known", source, entry.told_by_http)
        monkeypatch.setattr(entry, "HOOKS", (hook._replace(source=source), told))
        hooked.clear()
        entry.load()
        return entry.report, [hook.__name__ for hook, _ in hooked.values()]

    return load


def test_known_functions_are_hooked_and_changed_ones_only_reported(loaded):
    assert loaded("") == ({"http": "ok"}, ["packed"])
    report, hooked = loaded("0123")
    assert report == {"http": "SGLang has changed: place:known, place:known"} and hooked == ["told_by_http"]


@pytest.mark.parametrize(
    ("states", "said"),
    [
        ([{}], "scheduler process: it did not load"),
        ([{"rlpipe_plugin": {"scheduler": "ok"}}], "http process: it did not load"),
        ([{"rlpipe_plugin": {"scheduler": "SGLang has changed: x:y", "http": "ok"}}], "changed: x:y"),
        (GOOD["internal_states"] + [{"rlpipe_plugin": {"http": "ok"}}], "scheduler process"),
    ],
)
def test_a_server_without_the_plugin_is_refused_with_the_reason(states, said):
    config = RolloutConfig()
    with pytest.raises(RuntimeError, match=rf"{said}.*rollout\.sglang\.plugin=false"):
        check_server_info(GOOD | {"internal_states": states}, config, SpecConfig())
    config.sglang.plugin = False
    check_server_info(GOOD | {"internal_states": states}, config, SpecConfig())
