"""What a draft is trained to minimise: one file per objective, whose name is that of the file.

supervised/  a loss from what target and draft say along given text
windows/     a loss from windows that the draft makes itself and the target verifies

`mtp.objective` takes the names of the files (`rlpipe.config.mtp_loss` lists them, without an import).
"""
