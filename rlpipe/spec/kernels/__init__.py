"""Verification rules as Triton kernels: `rlpipe.spec.verify` with `backend="triton"`.

Owns the GPU form of the three rules for chains of draft tokens; the embedded engine uses it on a GPU. The
torch functions in `rlpipe.spec.verify` are the reference: for the same uniforms both give the same verdict,
except at a tie, when the uniform is within float64 rounding of a boundary between two tokens (`launch.py`
states the bound).

    launch.py    checks arguments, chooses tiles and starts the kernels
    programs.py  the kernels

Triton is imported on the first call, never when this package is imported.
"""

from rlpipe.spec.kernels.launch import verify_block, verify_chain, verify_target_only

__all__ = ["verify_block", "verify_chain", "verify_target_only"]
