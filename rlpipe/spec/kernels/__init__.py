"""Verification rules as Triton kernels: `rlpipe.spec.verify` with `backend="triton"`.

Owns the GPU form of the three rules over chains of draft tokens, by which the embedded engine verifies on a
GPU. The torch functions in `rlpipe.spec.verify` are their reference: for the same uniforms both give the same
verdict, except at a tie, where the uniform is within float64's rounding of a boundary between two tokens
(`launch.py` states the bound).

    launch.py    checks arguments, chooses tiles and starts the kernels
    programs.py  the kernels

Triton is imported on the first call, never when this package is imported.
"""

from rlpipe.spec.kernels.launch import verify_block, verify_chain, verify_target_only

__all__ = ["verify_block", "verify_chain", "verify_target_only"]
