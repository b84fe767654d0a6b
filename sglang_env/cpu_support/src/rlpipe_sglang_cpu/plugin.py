"""SGLang's plugin entry point: adds MTP decoding on a CPU, and does nothing where there is a GPU.

SGLang calls `load` once in every process it starts, before it builds a model. It looks up each replaced
function or class at every use, where `load` has set the replacement, so the order of imports does not matter.
"""

from __future__ import annotations

import logging

import torch

logger = logging.getLogger(__name__)


def load() -> None:
    """Install the CPU parts; does nothing when CUDA is available."""
    if torch.cuda.is_available():
        logger.warning("rlpipe-sglang-cpu stays inactive: CUDA is available")
        return
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.speculative import eagle_utils
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    from rlpipe_sglang_cpu import verify
    from rlpipe_sglang_cpu.attention import DraftSteps, MtpTorchNativeBackend

    ATTENTION_BACKENDS["torch_native"] = MtpTorchNativeBackend
    create = DraftBackendFactory._create_backend

    def create_backend(
        self: DraftBackendFactory,
        backend_name: str,
        backend_map: dict,
        error_template: str,
        stamps_children: bool = False,
    ):
        def steps():
            return "torch_native", DraftSteps(self.draft_model_runner, self.topk, self.speculative_num_steps)

        def extend():
            return "torch_native", MtpTorchNativeBackend(self.draft_model_runner)

        known = {**backend_map, "torch_native": steps if stamps_children else extend}
        return create(self, backend_name, known, error_template, stamps_children)

    DraftBackendFactory._create_backend = create_backend

    def verify_uses_greedy(*, is_all_greedy: bool, **_) -> bool:
        return is_all_greedy  # SGLang's function is also true on any CPU, which would prevent sampling

    eagle_utils._verify_uses_greedy = verify_uses_greedy
    eagle_utils.chain_speculative_sampling_triton = verify.chain_speculative_sampling
    eagle_utils.tree_speculative_sampling_target_only = verify.chain_target_only_sampling
    eagle_utils.top_k_renorm_prob = verify.top_k_renorm
