"""The control of a run: admission, staleness, the training loop and checkpoints. It does no work per token.

Reading order:

1. `controller`: the async loop; its docstring has a diagram and a table of what each loop waits for.
2. `cluster_protocol`: the methods that the loop calls on the processes of rollout and training.
3. `backlog`, with `prompts`, `staleness` and `group_buffer`: the prompts between admission and training.
4. `ledger`, with `ledger_file`: the state of every prompt and trajectory, in SQLite.
5. `checkpoint_writer`, with `checkpoints` and `saved_groups`: saving and resuming.
6. `masked`, `selection` and `worker_scaling`: rules that monitor a run.
7. `dump`: batches as files, for runs that only generate or only train.
8. `run_directory`: the lock and the settings of a run.
"""
