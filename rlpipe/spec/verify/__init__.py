"""Verification rules, as pure functions: what is emitted, given drafts, probabilities and uniforms.

Lossless: chain (rejection), block, target-only, greedy, and their tree forms. Lossy by name: typical.
"""

from rlpipe.spec.verify.block import verify_block
from rlpipe.spec.verify.chain import verify_chain, verify_chain_gumbel
from rlpipe.spec.verify.greedy import verify_greedy
from rlpipe.spec.verify.target_only import verify_target_only
from rlpipe.spec.verify.tree import rearrange_kv, verify_tree, verify_tree_greedy
from rlpipe.spec.verify.typical import verify_typical
from rlpipe.spec.verify.verdict import LossyVerdict, TreeVerdict, Verdict

__all__ = [
    "LossyVerdict",
    "TreeVerdict",
    "Verdict",
    "rearrange_kv",
    "verify_block",
    "verify_chain",
    "verify_chain_gumbel",
    "verify_greedy",
    "verify_target_only",
    "verify_tree",
    "verify_tree_greedy",
    "verify_typical",
]
