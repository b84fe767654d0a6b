"""Certificates of servers: tests whether the tokens of a server have the distribution of its model.

Owns `rlpipe certify`. Flow: dialects (the server's API) -> samples -> reference (the same tokens in
transformers, float32) -> lines (one exact test each) -> causes (the fault that explains the failed lines)
-> page. Statistics use only numpy; only the reference pass loads a model.
"""
