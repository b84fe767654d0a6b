"""Environments of the library verifiers 0.4, run in this process.

`suite` is the environment, `agent` represents the model, and `load` and `toolsets` call the library.
"""
