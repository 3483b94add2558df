"""verl: reinforcement learning for post-training large language models.

`import verl` is cheap on purpose (no torch): heavy modules load when they are used.
"""

__version__ = "0.1.0"
