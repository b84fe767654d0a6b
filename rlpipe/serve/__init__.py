"""An endpoint where agents send requests to the model of a rollout worker; records exact tokens.

    HTTP (`server`) -> API (`chat`, `responses`, `messages`, `generate`) -> `Session` -> the engine

Owns HTTP, the APIs ("dialects") and the recording of conversations (`session`). The collector
(`rlpipe.rollout.collector`) generates and rewards turns, and `rlpipe.envs.agent` runs agents.
"""
