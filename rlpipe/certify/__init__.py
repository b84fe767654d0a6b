"""Certificates of servers: whether the tokens of a server have the distribution of its model.

Owns `rlpipe certify`. Flow: dialects (what does the server speak) -> samples -> reference (the same tokens in
transformers, float32) -> lines (one exact test each) -> causes (which fault explains the lines that fail)
-> page. Statistics are numpy only; the reference pass is the only part that loads a model.
"""
