"""rlpipe's changes inside an SGLang server, on a CPU and on a GPU.

    plugin.py   the entry point that SGLang calls in every process: the table of hooks, and the report
    drafts.py   in a scheduler: samples drafts from logits, and keeps the logits for verification
    verify.py   in a scheduler: rejection sampling from logits
    measure.py  in a scheduler: entropy and log-probability of each token, from the logits it was sampled from
    ranks.py    in a scheduler: before the first request, checks that all ranks of a server run the same code
    in_flight.py  in a scheduler: takes the result of the running step before a weight update begins
    width.py    in a scheduler, with spec.adaptive=true: chooses how many tokens each step drafts
    attention.py  in a scheduler on a CPU: attention only for the queries of a step
    cpu.py      on a CPU: forks processes; in a scheduler, additions for DeepSeek-V3 and drafts of MoE models
    routes.py   in a scheduler on a CPU: memory for each token's experts
    model_files in a scheduler: imports only the file of the served model
    pack.py     in the HTTP process: packs entropies and log-probabilities as float32 in the answer

It is a part of rlpipe: a server has this folder on its PYTHONPATH. It does not import rlpipe, which the
server's environment does not have. In docstrings of hooks, "Around `f`" means that the hook replaces SGLang's
function f and gets it as `original`; "After `f`" means that the hook is called after f, with f's result.
"""
