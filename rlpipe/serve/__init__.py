"""An endpoint through which agents talk to the model of a rollout worker, token for token.

    HTTP (`server`) -> dialect (`chat`, `responses`, `messages`, `generate`) -> `Session` -> the engine

Owns HTTP, dialects and the recording of conversations (`session`). How turns are generated and rewarded is
the collector's (`rlpipe.rollout.collector`), what an agent is `rlpipe.envs.agent`'s.
"""
