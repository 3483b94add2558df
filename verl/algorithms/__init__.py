"""Algorithms as pure functions and frozen specs: nothing here knows of devices, processes or engines.

- `advantages`: GAE, group-relative advantages, whitening, rewards and scores put on tokens
- `kl`: per-token KL estimators, the penalty in the reward, the controller of its coefficient
- `aggregation`: what a "mean loss" is a mean of, as weights a token and a count
- `losses`: policy, value and supervised losses as sums and counts
- `spec`: `Algorithm`, which ties them together for one trainer
- `select`: an `Algorithm` from the configuration, and the automatic choice between algorithms
"""
