"""Lossless verification rules, as pure functions."""

from rlpipe.spec.verify.chain import Verdict, verify_chain, verify_target_only

__all__ = ["Verdict", "verify_chain", "verify_target_only"]
