"""Group-relative advantages.

Source: DeepSeekMath (arXiv:2402.03300) without the division by the standard deviation, as argued
in Dr. GRPO (arXiv:2503.20783).
"""


def advantages(rewards: list[float]) -> list[float]:
    """A_i = r_i - mean(r) over the rewards of one group [n]; [] for an empty group."""
    if not rewards:
        return []
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def broadcast(advantage: float, loss_mask: list[bool]) -> list[float]:
    """One advantage per token [T]: `advantage` where the policy sampled, 0.0 elsewhere."""
    return [advantage if sampled else 0.0 for sampled in loss_mask]
