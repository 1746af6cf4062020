"""Preference losses as functions of log-probabilities: for pairs of which one answer was preferred,
and for single labelled answers.

Most compare how much more likely an answer is under the policy than under the reference: the
log-ratio of an answer, summed over its targets. A reference-free loss uses the policy's own
log-probabilities.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class AnswerLogProbs(NamedTuple):
    """Log-probabilities of one answer of each pair."""

    # Sum over the answer's targets, by the policy, nats.
    log_prob: Float[Array, "*p"]
    # Sum over the answer's targets, by the reference, nats.
    reference: Float[Array, "*p"]
    # Number of targets, at least 1.
    length: Float[Array, "*p"]

    @property
    def log_ratio(self) -> Float[Array, "*p"]:
        """Return log(policy / reference)."""
        return self.log_prob - self.reference

    @property
    def mean_log_ratio(self) -> Float[Array, "*p"]:
        """Return the mean log-ratio of a target."""
        return self.log_ratio / self.length

    @property
    def mean_log_prob(self) -> Float[Array, "*p"]:
        """Return the mean log-probability of a target."""
        return self.log_prob / self.length


class PreferenceCoefficients(NamedTuple):
    """Parameters of the losses; each loss documents which it reads.

    Attributes:
        beta: strength of the tie to the reference: a larger beta keeps the policy closer.
        label_smoothing: the share of pairs whose labels are assumed to be wrong.
        margin: target margin of the chosen answer, in losses with a margin.
    """

    beta: float
    label_smoothing: float = 0.0
    margin: float = 0.0


Loss = Callable[[AnswerLogProbs, AnswerLogProbs, PreferenceCoefficients], Float[Array, "*p"]]


def sigmoid(
    chosen: AnswerLogProbs, rejected: AnswerLogProbs, strength: PreferenceCoefficients
) -> Float[Array, "*p"]:
    """Return the DPO loss: -log sigmoid(beta * difference of the log-ratios); with label smoothing,
    cDPO.

    Source: Rafailov et al., https://arxiv.org/abs/2305.18290, equation 7; cDPO: Mitchell,
        https://ericmitchell.ai/cdpo.pdf.
    """
    return _smoothed(strength.beta * (chosen.log_ratio - rejected.log_ratio), strength)


def sigmoid_norm(
    chosen: AnswerLogProbs, rejected: AnswerLogProbs, strength: PreferenceCoefficients
) -> Float[Array, "*p"]:
    """Return the DPO loss of log-ratios averaged over an answer's targets; with label smoothing as
    in `sigmoid`.

    Source: Lambert et al., https://arxiv.org/abs/2411.15124, section 5.
    """
    difference = chosen.mean_log_ratio - rejected.mean_log_ratio
    return _smoothed(strength.beta * difference, strength)


def robust(
    chosen: AnswerLogProbs, rejected: AnswerLogProbs, strength: PreferenceCoefficients
) -> Float[Array, "*p"]:
    """Return the rDPO loss: DPO without the bias of wrong labels; needs a label smoothing below
    0.5.

    Source: Chowdhury et al., https://arxiv.org/abs/2403.00409.
    """
    scaled = strength.beta * (chosen.log_ratio - rejected.log_ratio)
    wrong = strength.label_smoothing
    clean = -(1 - wrong) * jax.nn.log_sigmoid(scaled)
    flipped = -wrong * jax.nn.log_sigmoid(-scaled)
    return (clean - flipped) / (1 - 2 * wrong)


def hinge(
    chosen: AnswerLogProbs, rejected: AnswerLogProbs, strength: PreferenceCoefficients
) -> Float[Array, "*p"]:
    """Return the SLiC loss: max(0, 1 - beta * difference of the log-ratios).

    Source: Zhao et al., https://arxiv.org/abs/2305.10425; with a reference as in Liu et al.,
        https://arxiv.org/abs/2309.06657.
    """
    return jax.nn.relu(1 - strength.beta * (chosen.log_ratio - rejected.log_ratio))


def ipo(
    chosen: AnswerLogProbs, rejected: AnswerLogProbs, strength: PreferenceCoefficients
) -> Float[Array, "*p"]:
    """Return the IPO loss: (difference of the mean log-ratios - 1 / (2 beta))^2.

    Source: Azar et al., https://arxiv.org/abs/2310.12036, equation 17, of means over an answer's
        targets, as its authors computed it.
    """
    difference = chosen.mean_log_ratio - rejected.mean_log_ratio
    return (difference - 1 / (2 * strength.beta)) ** 2


def exo_pair(
    chosen: AnswerLogProbs, rejected: AnswerLogProbs, strength: PreferenceCoefficients
) -> Float[Array, "*p"]:
    """Return the reverse KL of the policy's choice between both answers from the labels; needs a
    label smoothing above 0.

    Source: Ji et al., https://arxiv.org/abs/2402.00856, equation 16.
    """
    scaled = strength.beta * (chosen.log_ratio - rejected.log_ratio)
    log_win = jax.nn.log_sigmoid(scaled)
    log_lose = jax.nn.log_sigmoid(-scaled)
    of_win = jnp.exp(log_win) * (log_win - jnp.log1p(-strength.label_smoothing))
    of_lose = jnp.exp(log_lose) * (log_lose - jnp.log(strength.label_smoothing))
    return of_win + of_lose


def nca_pair(
    chosen: AnswerLogProbs, rejected: AnswerLogProbs, strength: PreferenceCoefficients
) -> Float[Array, "*p"]:
    """Return the noise-contrastive loss, which keeps the likelihood of the chosen answer from
    falling.

    Source: Chen et al., https://arxiv.org/abs/2402.05369, with two answers.
    """
    of_chosen = strength.beta * chosen.log_ratio
    of_rejected = strength.beta * rejected.log_ratio
    wins = jax.nn.log_sigmoid(of_chosen)
    loses = jax.nn.log_sigmoid(-of_chosen) + jax.nn.log_sigmoid(-of_rejected)
    return -wins - 0.5 * loses


def bco_pair(
    chosen: AnswerLogProbs, rejected: AnswerLogProbs, strength: PreferenceCoefficients
) -> Float[Array, "*p"]:
    """Return the loss of a classifier of each answer on its own, without the shift by a mean
    reward.

    Source: Jung et al., https://arxiv.org/abs/2404.04656.
    """
    of_chosen = jax.nn.log_sigmoid(strength.beta * chosen.log_ratio)
    of_rejected = jax.nn.log_sigmoid(-strength.beta * rejected.log_ratio)
    return -of_chosen - of_rejected


def sppo_hard(
    chosen: AnswerLogProbs, rejected: AnswerLogProbs, strength: PreferenceCoefficients
) -> Float[Array, "*p"]:
    """Return the self-play loss with a certain winner: squares around +-1 / (2 beta).

    Source: Wu et al., https://arxiv.org/abs/2405.00675, equation 4.7 with probabilities 1 and 0.
    """
    half = 0.5 / strength.beta
    return (chosen.log_ratio - half) ** 2 + (rejected.log_ratio + half) ** 2


def apo_zero(
    chosen: AnswerLogProbs, rejected: AnswerLogProbs, strength: PreferenceCoefficients
) -> Float[Array, "*p"]:
    """Return the APO-zero loss, which raises the chosen answer and lowers the rejected one; for
    answers better than the policy's.

    Source: D'Oosterlinck et al., https://arxiv.org/abs/2408.06266, equation 7.
    """
    of_chosen = 1 - jax.nn.sigmoid(strength.beta * chosen.log_ratio)
    return of_chosen + jax.nn.sigmoid(strength.beta * rejected.log_ratio)


def apo_down(
    chosen: AnswerLogProbs, rejected: AnswerLogProbs, strength: PreferenceCoefficients
) -> Float[Array, "*p"]:
    """Return the APO-down loss, which lowers both answers, the rejected one more; for chosen
    answers worse than the policy's.

    Source: D'Oosterlinck et al., https://arxiv.org/abs/2408.06266, equation 8.
    """
    of_chosen = jax.nn.sigmoid(strength.beta * chosen.log_ratio)
    difference = chosen.log_ratio - rejected.log_ratio
    return of_chosen + 1 - jax.nn.sigmoid(strength.beta * difference)


def simpo(
    chosen: AnswerLogProbs, rejected: AnswerLogProbs, strength: PreferenceCoefficients
) -> Float[Array, "*p"]:
    """Return the SimPO loss: -log sigmoid(beta * difference of the mean log-probabilities -
    margin); reference-free.

    Source: Meng et al., https://arxiv.org/abs/2405.14734, equation 6; the margin is their gamma.
    """
    difference = chosen.mean_log_prob - rejected.mean_log_prob
    return _smoothed(strength.beta * difference - strength.margin, strength)


def orpo(
    chosen: AnswerLogProbs, rejected: AnswerLogProbs, strength: PreferenceCoefficients
) -> Float[Array, "*p"]:
    """Return the odds-ratio term of ORPO: -beta * log sigmoid(log of the odds ratio);
    reference-free.

    The objective adds the other term of ORPO, the cross-entropy of the chosen answers. Odds are
    those of the mean probability of a target.

    Source: Hong et al., https://arxiv.org/abs/2403.07691, equation 7; beta is their lambda.
    """
    log_odds = _log_odds(chosen.mean_log_prob) - _log_odds(rejected.mean_log_prob)
    return -strength.beta * jax.nn.log_sigmoid(log_odds)


LOSSES: dict[str, Loss] = {
    "sigmoid": sigmoid,
    "sigmoid_norm": sigmoid_norm,
    "robust": robust,
    "hinge": hinge,
    "ipo": ipo,
    "exo_pair": exo_pair,
    "nca_pair": nca_pair,
    "bco_pair": bco_pair,
    "sppo_hard": sppo_hard,
    "apo_zero": apo_zero,
    "apo_down": apo_down,
    "simpo": simpo,
    "orpo": orpo,
}
# Losses without a reference.
FREE_OF_REFERENCE = frozenset({"simpo", "orpo"})


def of_label(
    log_ratio: Float[Array, "*p"], label: Float[Array, "*p"], zero: Float[Array, "*p"], beta: float
) -> Float[Array, "*p"]:
    """Return KTO's loss: 1 - sigmoid(label * beta * (log-ratio - zero)).

    Args:
        log_ratio: log(policy / reference) of an answer, nats.
        label: 1 for a good answer, -1 for a bad one.
        zero: the neutral log-ratio: an estimate of the divergence of the policy from the reference.
            0 gives APO-zero of single answers.
        beta: as for `PreferenceCoefficients`.

    Source: Ethayarajh et al., https://arxiv.org/abs/2402.01306, equation 8, with the weights left
        to the caller and lambda_y for a constant; D'Oosterlinck et al.,
        https://arxiv.org/abs/2408.06266, equation 7.
    """
    return jax.nn.sigmoid(-label * beta * (log_ratio - zero))


def bradley_terry(
    chosen: Float[Array, "*p"], rejected: Float[Array, "*p"], margin: Float[Array, "*p"]
) -> Float[Array, "*p"]:
    """Return -log sigmoid(difference of the rewards - margin), the negative log-likelihood that the
    chosen answer wins by the margin.

    Source: Ouyang et al., https://arxiv.org/abs/2203.02155, equation 1; with a margin as in Touvron
        et al., https://arxiv.org/abs/2307.09288, equation 2.
    """
    return -jax.nn.log_sigmoid(chosen - rejected - margin)


def off_centre(chosen: Float[Array, "*p"], rejected: Float[Array, "*p"]) -> Float[Array, "*p"]:
    """Return the square of the sum of the rewards of a pair, which a regulariser keeps near 0.

    Source: Eisenstein et al., https://arxiv.org/abs/2312.09244, section 3.
    """
    return (chosen + rejected) ** 2


def _smoothed(scaled: Float[Array, "*p"], strength: PreferenceCoefficients) -> Float[Array, "*p"]:
    """Return -log sigmoid of a scaled difference, with label smoothing."""
    loss = -(1 - strength.label_smoothing) * jax.nn.log_sigmoid(scaled)
    return loss - strength.label_smoothing * jax.nn.log_sigmoid(-scaled)


def _log_odds(log_prob: Float[Array, "*p"]) -> Float[Array, "*p"]:
    """Return log(p / (1 - p)) of a log-probability below 0; a probability of 1 is replaced by the
    next smaller float32."""
    nearest = -float(jnp.finfo(jnp.float32).epsneg)
    log_prob = jnp.minimum(log_prob, nearest)
    return log_prob - jnp.log(-jnp.expm1(log_prob))
