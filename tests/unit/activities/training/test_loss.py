"""The default RL loss against golden vectors, in float64, and its properties."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ratchet.activities.training.loss import rl_terms, step_loss
from ratchet.configs.trainer import DefaultLossConfig

TRAINER = [0.50, 0.62, 0.30, 0.45, 0.80, 0.75]
ENGINE = [0.45, 0.48, 0.45, 0.72, 0.72, 0.50]
ADVANTAGES = [0.75, 0.75, -0.25, -0.25, 0.0, 0.5]
LOSSES = [
    -0.8333222325,
    -0.9686844981,
    0.1668310686,
    0.0002209034,
    0.0000111008,
    0.0001644020,
]
MISMATCH = [
    0.0057505955,
    0.0357332925,
    0.0721317748,
    0.0950036292,
    0.0057505955,
    0.0945348919,
]


def f64(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def golden(mask: list[bool] | None = None, weights: list[float] | None = None):  # type: ignore[no-untyped-def]
    return rl_terms(
        f64(TRAINER).log(),
        f64(ENGINE).log(),
        f64(ADVANTAGES),
        torch.tensor(mask or [True] * 6),
        DefaultLossConfig(),
        None if weights is None else f64(weights),
    )


def test_golden_terms() -> None:
    terms = golden()
    torch.testing.assert_close(terms.loss, f64(LOSSES), atol=1e-10, rtol=0)
    torch.testing.assert_close(terms.mismatch_kl, f64(MISMATCH), atol=1e-10, rtol=0)
    assert terms.loss.sum().item() == pytest.approx(-1.6347792558, abs=1e-10)
    assert terms.masked_low.tolist() == [False, False, False, True, False, False]
    assert terms.masked_high.tolist() == [False, False, False, False, False, True]


def test_golden_weighted_sum() -> None:
    assert golden(weights=[1, 0.5, 1, 2, 1, 0.25]).loss.sum().item() == pytest.approx(
        -1.1503394048, abs=1e-10
    )


def test_zero_weight_is_no_member() -> None:
    terms = golden(weights=[1, 0, 1, 1, 1, 1])
    assert terms.members.tolist() == [True, False, True, True, True, True]
    assert terms.loss[1] == 0 and terms.mismatch_kl[1] == 0


def test_zero_advantage_uses_the_low_test() -> None:
    terms = rl_terms(
        f64([0.1]).log(), f64([0.9]).log(), f64([0.0]), torch.tensor([True]), DefaultLossConfig()
    )
    assert terms.masked_low.item() and not terms.masked_high.item()


def test_dropped_token_keeps_its_kl_gradient() -> None:
    logprob = f64([0.9]).log().requires_grad_()
    terms = rl_terms(
        logprob, f64([0.5]).log(), f64([1.0]), torch.tensor([True]), DefaultLossConfig()
    )
    terms.loss.sum().backward()
    assert terms.masked_high.item()
    assert logprob.grad is not None
    # d/dt of kl_tau * (t - i)^2
    assert logprob.grad.item() == pytest.approx(2e-3 * (f64([0.9]) / 0.5).log().item())


def test_gradient_flows_through_the_ratio() -> None:
    logprob = f64([0.5]).log().requires_grad_()
    config = DefaultLossConfig(kl_tau=0.0)
    rl_terms(
        logprob, f64([0.4]).log(), f64([2.0]), torch.tensor([True]), config
    ).loss.sum().backward()
    assert logprob.grad is not None
    assert logprob.grad.item() == pytest.approx(-2.0 * 0.5 / 0.4)


def test_nothing_leaks_from_padding() -> None:
    logprobs = f64([-1.0, -900.0]).requires_grad_()
    terms = rl_terms(
        logprobs,
        f64([-1.0, 800.0]),
        f64([1.0, 1.0]),
        torch.tensor([True, False]),
        DefaultLossConfig(),
    )
    terms.loss.sum().backward()
    assert logprobs.grad is not None and logprobs.grad[1] == 0
    assert torch.isfinite(logprobs.grad).all()


def test_step_without_members_can_be_differentiated() -> None:
    logprobs = f64([-1.0]).requires_grad_()
    terms = rl_terms(logprobs, f64([-1.0]), f64([1.0]), torch.tensor([False]), DefaultLossConfig())
    step_loss(terms, 0).backward()
    assert logprobs.grad is not None and logprobs.grad.item() == 0


@given(st.lists(st.booleans(), min_size=6, max_size=6))
def test_masked_tokens_do_not_count(mask: list[bool]) -> None:
    expected = sum(loss for loss, member in zip(LOSSES, mask, strict=True) if member)
    assert golden(mask=mask if any(mask) else [False] * 6).loss.sum().item() == pytest.approx(
        expected, abs=1e-9
    )


@given(st.integers(1, 5))
def test_split_of_a_step_does_not_change_the_loss(at: int) -> None:
    whole = step_loss(golden(), 6)
    masks = [[n < at for n in range(6)], [n >= at for n in range(6)]]
    parts = [step_loss(golden(mask=mask), 6) for mask in masks]
    torch.testing.assert_close(sum(parts), whole, atol=1e-12, rtol=0)
