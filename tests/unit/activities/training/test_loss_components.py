"""IPO, custom, ref_kl and ce, and their sum, against golden vectors in float64."""

from pathlib import Path

import pytest
import torch

from ratchet.activities.training.custom_loss import load_function
from ratchet.activities.training.loss import (
    LossInputs,
    MemberCounts,
    ce_terms,
    custom_terms,
    ref_kl_terms,
    rl_terms,
    total_loss,
)
from ratchet.configs.trainer import CustomLossConfig, DefaultLossConfig, IpoLossConfig
from tests.unit.activities.training.test_loss import ADVANTAGES, ENGINE, TRAINER, f64

REFERENCE = [0.7, 0.8, 0.2, 0.25, 0.5, 0.9]
WEIGHTS = [1, 0.5, 1, 2, 1, 0.25]
ALL = torch.ones(6, dtype=torch.bool)


def inputs(**streams: torch.Tensor) -> LossInputs:
    return LossInputs(f64(TRAINER).log(), f64(ENGINE).log(), f64(ADVANTAGES), ALL, **streams)


def rl(given: LossInputs, config: DefaultLossConfig | IpoLossConfig | None = None):  # type: ignore[no-untyped-def]
    return rl_terms(
        given.trainer_logprobs,
        given.engine_logprobs,
        given.advantages,
        given.loss_mask,
        config or DefaultLossConfig(),
        given.rl_weights,
    )


def test_ipo() -> None:
    terms = rl(inputs(), IpoLossConfig())
    assert terms.loss.sum().item() == pytest.approx(-0.8326959224, abs=1e-10)
    assert terms.masked_high.tolist() == [False, True, False, False, False, True]
    assert terms.masked_low.tolist() == [False, False, True, True, False, False]


@pytest.mark.parametrize(
    ("weights", "total"), [([1.0] * 6, -0.1834024606), (WEIGHTS, 0.1863920530)]
)
def test_ref_kl(weights: list[float], total: float) -> None:
    args = f64(TRAINER).log(), f64(ENGINE).log(), f64(REFERENCE).log(), f64(weights)
    assert ref_kl_terms(*args).loss.sum().item() == pytest.approx(total, abs=1e-10)


def test_ref_kl_gradient_does_not_flow_through_the_lead() -> None:
    t = f64([0.5]).log().requires_grad_()
    ref_kl_terms(t, f64([0.5]).log(), f64([0.8]).log(), f64([1.0])).loss.sum().backward()
    assert t.grad is not None
    assert t.grad.item() == pytest.approx(-(f64([0.8]).log() - f64([0.5]).log()).item())


@pytest.mark.parametrize(
    ("weights", "count", "total"), [([1.0, 0.0, 1.0], 2, 0.15), ([0.1, 0.0, 0.1], 1, 0.03)]
)
def test_ce(weights: list[float], count: int, total: float) -> None:
    loss = ce_terms(f64([-0.1, -0.5, -0.2]), f64(weights)).sum() / count
    assert loss.item() == pytest.approx(total, abs=1e-12)


def test_components_add_up_each_over_its_own_members() -> None:
    given = inputs(ce_weights=f64([0, 0, 0.1, 0.1, 0, 0]))
    both = total_loss(given, rl(given), MemberCounts(rl=6, ce=2))
    assert both.total.item() == pytest.approx(-0.1723391843, abs=1e-10)
    assert both.parts["rl"] == pytest.approx(-1.6347792558 / 6, abs=1e-10)
    full = inputs(
        rl_weights=torch.zeros(6, dtype=torch.float64),
        ref_kl_weights=torch.ones(6, dtype=torch.float64),
        ref_logprobs=f64(REFERENCE).log(),
    )
    opd = total_loss(full, rl(full), MemberCounts(ref_kl=6))
    assert opd.total.item() == pytest.approx(-0.1834024606 / 6, abs=1e-10)
    assert set(opd.parts) == {"ref_kl"}


def test_ce_and_ref_kl_members_need_no_loss_mask() -> None:
    t = f64([0.5, 0.5]).log().requires_grad_()
    none = torch.zeros(2, dtype=torch.bool)
    given = LossInputs(t, t.detach(), f64([0, 0]), none, ce_weights=f64([0.0, 1.0]))
    total_loss(given, rl(given), MemberCounts(ce=1)).total.backward()
    assert t.grad is not None and t.grad.tolist() == [0.0, -1.0]


def test_ref_kl_without_a_reference() -> None:
    given = inputs(ref_kl_weights=f64([1.0] * 6))
    with pytest.raises(ValueError, match="ref_logprobs"):
        total_loss(given, rl(given), MemberCounts(rl=6, ref_kl=6))


USER_LOSS = """
def per_token(inputs, scale):
    return -scale * inputs.advantages * inputs.trainer_logprobs

def summed(inputs, scale):
    return per_token(inputs, scale)[inputs.loss_mask].sum()

def wrong(inputs, scale):
    return inputs.trainer_logprobs[:1]
"""


def test_custom(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(USER_LOSS)
    t = f64([TRAINER, TRAINER]).log().requires_grad_()  # type: ignore[list-item]
    i, adv = f64([ENGINE, ENGINE]).log(), f64([ADVANTAGES, ADVANTAGES])  # type: ignore[list-item]
    mask = torch.tensor([[True] * 6, [True, False] * 3])
    given = LossInputs(t, i, adv, mask)
    spans = [(0, 0, 4), (0, 4, 6), (1, 0, 6)]
    expected = (-2.0 * adv * t * mask).sum()
    for name in ("per_token", "summed"):
        config = CustomLossConfig(
            function=f"mine:{name}", path=str(tmp_path), kwargs={"scale": 2.0}
        )
        terms = custom_terms(given, load_function(config), config, spans)
        torch.testing.assert_close(terms.loss, expected, atol=1e-12, rtol=0)
        assert not (terms.masked_low | terms.masked_high).any()
        assert total_loss(given, terms, MemberCounts(rl=9)).parts["rl"] == pytest.approx(
            expected.item() / 9
        )
    config = CustomLossConfig(function="mine:wrong", path=str(tmp_path), kwargs={"scale": 1.0})
    with pytest.raises(ValueError, match="returned"):
        custom_terms(given, load_function(config), config, spans)
    empty = LossInputs(t, i, adv, mask & False)
    custom_terms(empty, load_function(config), config, spans).loss.backward()
    assert t.grad is not None and not t.grad.any()


@pytest.mark.parametrize(
    ("function", "says"), [("mine:no", "no function"), ("nowhere:f", "cannot be imported")]
)
def test_custom_that_is_not_there(tmp_path: Path, function: str, says: str) -> None:
    (tmp_path / "mine.py").write_text(USER_LOSS)
    with pytest.raises(ValueError, match=says):
        load_function(CustomLossConfig(function=function, path=str(tmp_path)))
