"""Verification rules: pure functions from drafts, probabilities and uniforms to emitted tokens.

All rules are lossless: chain (rejection), block, target-only, greedy, and the tree forms.
"""

from rlpipe.spec.verify.block import verify_block
from rlpipe.spec.verify.chain import verify_chain
from rlpipe.spec.verify.common import backend_for
from rlpipe.spec.verify.greedy import verify_greedy
from rlpipe.spec.verify.target_only import verify_target_only
from rlpipe.spec.verify.tree import rearrange_kv, verify_tree, verify_tree_greedy
from rlpipe.spec.verify.verdict import TreeVerdict, Verdict

__all__ = [
    "TreeVerdict",
    "Verdict",
    "backend_for",
    "rearrange_kv",
    "verify_block",
    "verify_chain",
    "verify_greedy",
    "verify_target_only",
    "verify_tree",
    "verify_tree_greedy",
]
