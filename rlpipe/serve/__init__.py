"""An endpoint through which agents talk to the model of a rollout worker, token for token.

    HTTP (`server`) -> dialect (`chat`, `responses`, `messages`, `generate`) -> `Session` -> the engine

Owns HTTP, dialects and the recording of conversations (`session`). The collector (`rlpipe.rollout.collector`)
generates and rewards turns, and `rlpipe.envs.agent` runs agents.
"""
