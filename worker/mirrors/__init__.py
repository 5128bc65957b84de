"""Copies of runs' curves, gauges and samples of evals in TensorBoard, Weights & Biases, MLflow and
trackio, beside training.

`python -m ratchet.worker.mirrors --to tensorboard=DIR --to wandb=PROJECT --to mlflow=ADDRESS`.
Invariants:

- Mirrors only read, over the REST API; no other part of Ratchet depends on them.
- Each target has a process of its own, which may be killed at any moment.
- A target gets every record once and in order: what is about to be sent is written down first,
  what was sent is committed after the target took it, and after an interruption the target reports,
  or is made to show, how much of it it holds.
"""
