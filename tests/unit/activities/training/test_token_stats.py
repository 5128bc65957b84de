"""Statistics over tokens, against the golden vectors of the losses."""

import math

import pytest
import torch

from docs.step_metrics import undescribed
from ratchet.activities.training.loss import (
    LossInputs,
    LossTerms,
    MemberCounts,
    mismatch_kl,
    ref_kl_terms,
    rl_terms,
    total_loss,
)
from ratchet.activities.training.token_stats import TokenStats
from ratchet.configs.trainer import DefaultLossConfig

T = torch.tensor([[0.50, 0.62, 0.30, 0.45, 0.80, 0.75]], dtype=torch.float64).log()
I = torch.tensor([[0.45, 0.48, 0.45, 0.72, 0.72, 0.50]], dtype=torch.float64).log()  # noqa: E741
A = torch.tensor([[0.75, 0.75, -0.25, -0.25, 0.0, 0.5]], dtype=torch.float64)
MASK = torch.ones(1, 6, dtype=torch.bool)
COUNTS = MemberCounts(ref_kl=6)
ENTROPY = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]], dtype=torch.float64)


def stats(
    ref_kl: LossTerms | None = None, entropy: torch.Tensor = ENTROPY, **streams: torch.Tensor
) -> dict[str, float]:
    """Metrics of one micro-batch of two envs, three tokens each."""
    inputs = LossInputs(T, I, A, MASK, **streams)
    rl = rl_terms(T, I, A, MASK, DefaultLossConfig(), streams.get("rl_weights"))
    first = torch.tensor([[True] * 3 + [False] * 3])
    made = TokenStats()
    made.add(inputs, rl, entropy, mismatch_kl(T, I, MASK), {"a": first, "b": ~first}, ref_kl)
    return made.metrics()


def test_families_agree_with_the_golden_vectors() -> None:
    found = stats()
    golden = [0.0057505955, 0.0357332925, 0.0721317748, 0.0950036292, 0.0057505955, 0.0945348919]
    assert found["mismatch_kl/all/mean"] == pytest.approx(sum(golden) / 6, abs=1e-9)
    assert found["mismatch_kl/all/max"] == pytest.approx(golden[3], abs=1e-9)
    assert found["mismatch_kl/a/mean"] == pytest.approx(sum(golden[:3]) / 3, abs=1e-9)
    # Dropped are index 3 (low) and index 5 (high).
    assert found["is_masked/mean"] == pytest.approx(2 / 6)
    assert found["is_masked_low/mean"] == found["is_masked_high/mean"] == pytest.approx(1 / 6)
    assert found["masked_mismatch_kl/mean"] == pytest.approx((golden[3] + golden[5]) / 2, abs=1e-9)
    kept = [golden[k] for k in (0, 1, 2, 4)]
    assert found["unmasked_mismatch_kl/mean"] == pytest.approx(sum(kept) / 4, abs=1e-9)
    assert found["masked_advantage_positive/mean"] == 0.5
    assert found["masked_advantage_negative/mean"] == 0.5
    assert (found["entropy/b/min"], found["entropy/b/median"], found["entropy/b/max"]) == (4, 5, 6)
    assert found["entropy/all/std"] == pytest.approx(math.sqrt(35 / 12))
    assert found["kl_ent_ratio/mean"] == pytest.approx(found["mismatch_kl/all/mean"] / 3.5)
    assert not any(key.startswith(("ref_kl", "nll")) for key in found)


def test_a_policy_that_is_certain_has_no_ratio_to_its_entropy() -> None:
    found = stats(entropy=torch.zeros_like(ENTROPY))
    assert found["entropy/all/mean"] == 0 and "kl_ent_ratio/mean" not in found


def test_reference_and_cross_entropy_are_about_their_members_alone() -> None:
    reference = torch.tensor([[0.7, 0.8, 0.2, 0.25, 0.5, 0.9]], dtype=torch.float64).log()
    one = torch.tensor([[1.0, 0.0, 0.0, 0.0, 0.0, 0.5]], dtype=torch.float64)
    found = stats(
        rl_weights=torch.zeros(1, 6), ce_weights=one, ref_kl_weights=one, ref_logprobs=reference
    )
    assert found["nll/mean"] == pytest.approx(-(math.log(0.5) + math.log(0.75)) / 2)
    lead = (math.log(0.5 / 0.7) + math.log(0.75 / 0.9)) / 2
    assert found["ref_kl/mean"] == pytest.approx(lead)
    assert "is_masked/mean" not in found, "no member of the rl component"
    assert found["entropy/all/mean"] == 3.5


def test_the_trust_region_of_ref_kl_stands_beside_that_of_rl() -> None:
    """All tokens are members; index 3 has fallen by 0.27, more than the bound."""
    on = torch.ones(1, 6, dtype=torch.float64)
    inputs = LossInputs(T, I, A, MASK, 0 * on, None, on, T)
    share = total_loss(inputs, rl_terms(T, I, A, MASK, DefaultLossConfig(), 0 * on), COUNTS)
    found = stats(share.ref_kl, rl_weights=0 * on, ref_kl_weights=on, ref_logprobs=T)
    terms = ref_kl_terms(T, I, T, on)
    golden = terms.mismatch_kl[0].tolist()
    dropped = terms.masked_low[0].tolist()
    assert sum(dropped) == 1 and dropped[3]
    assert found["ref_kl/is_masked/mean"] == pytest.approx(1 / 6)
    assert found["ref_kl/is_masked_low/mean"] == pytest.approx(1 / 6)
    assert found["ref_kl/is_masked_high/mean"] == 0.0
    assert found["ref_kl/masked_mismatch_kl/mean"] == pytest.approx(golden[3])
    rest = [value for place, value in enumerate(golden) if place != 3]
    assert found["ref_kl/unmasked_mismatch_kl/mean"] == pytest.approx(sum(rest) / 5)
    assert found["ref_kl/mismatch_kl/mean"] == pytest.approx(sum(golden) / 6)
    assert not undescribed(found)
    assert not any(key.startswith("is_masked") for key in found), "no member of the rl component"


def test_tokens_that_are_only_learnt_have_no_mismatch() -> None:
    """The middle four are members of rl, the outer two of ce alone."""
    on = torch.tensor([[0.0, 1.0, 1.0, 1.0, 1.0, 0.0]], dtype=torch.float64)
    found = stats(rl_weights=on, ce_weights=1 - on)
    golden = [0.0357332925, 0.0721317748, 0.0950036292, 0.0057505955]
    assert found["mismatch_kl/all/mean"] == pytest.approx(sum(golden) / 4, abs=1e-9)
    assert found["entropy/all/mean"] == 3.5
    learnt = stats(rl_weights=0 * on, ce_weights=1 + 0 * on)
    assert not any(key.startswith(("mismatch_kl", "kl_ent")) for key in learnt)
    pulled = stats(rl_weights=0 * on, ref_kl_weights=on, ref_logprobs=T)
    assert pulled["mismatch_kl/all/mean"] == found["mismatch_kl/all/mean"]


def test_step_without_sampled_tokens_has_no_keys() -> None:
    nothing = torch.zeros(1, 6, dtype=torch.bool)
    inputs = LossInputs(T, I, A, nothing)
    rl = rl_terms(T, I, A, nothing, DefaultLossConfig())
    made = TokenStats()
    made.add(inputs, rl, ENTROPY, mismatch_kl(T, I, nothing), {})
    assert made.metrics() == {}
