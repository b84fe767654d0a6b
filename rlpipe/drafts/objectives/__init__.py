"""Training objectives of drafts: the values of `draft.objective`.

supervised  losses from the distributions of target and draft along a fixed text
windows     losses from windows that the draft generates and the target verifies; `ppow` is one
"""
