"""What rlpipe changes inside an SGLang server, on a CPU and on a GPU.

    plugin.py   the entry point that SGLang calls in every process: the table of hooks, and the report
    drafts.py   in a scheduler: drafts from logits, which are kept as their law
    verify.py   in a scheduler: rejection sampling from logits
    measure.py  in a scheduler: entropy and log-probability of each token, from the logits it was sampled from
    ranks.py    in a scheduler: ranks of a server compare what runs in them, before the first request
    in_flight.py  in a scheduler: the step in flight when new weights come keeps the version that made it
    width.py    in a scheduler, where spec.adaptive=true: how many tokens each step drafts
    attention.py  in a scheduler on a CPU: attention from the queries of a step alone
    cpu.py      on a CPU: processes are forked; in a scheduler, what DeepSeek-V3 and drafts of mixtures need
    routes.py   in a scheduler: memory for the experts that read each token, on a CPU
    model_files in a scheduler: only the file of the served model is imported
    pack.py     in the HTTP process: both as packed float32 in the answer

Travels with rlpipe: a server finds this folder on its PYTHONPATH. Imports nothing of rlpipe, which the
server's environment does not have.
"""
