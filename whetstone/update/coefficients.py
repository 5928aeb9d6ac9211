"""Adaptive loss coefficients: beta towards a target KL, the entropy bonus towards a target entropy."""

from whetstone.config.sections import LossConfig
from whetstone.errors import non_finite

BETA_RATE = 0.1  # largest relative change of beta per step
ENTROPY_STEP = 0.005  # as in TRL


class Coefficients:
    def __init__(self, config: LossConfig):
        self._config = config
        self.beta = config.beta
        self._entropy_coef = config.entropy_coef
        self._last_entropy: float | None = None

    @property
    def entropy(self) -> float:
        """The weight of the bonus in the next step: 0 while the entropy is above its target."""
        target = self._config.entropy_target
        above = target is not None and self._last_entropy is not None and self._last_entropy > target
        return 0.0 if above else self._entropy_coef

    def adapt(self, means: dict[str, float]) -> None:
        """Adapt to the metrics of the last step."""
        config = self._config
        if config.target_kl is not None and "kl" in means and not non_finite(kl=means["kl"]):
            error = max(-1.0, min(1.0, means["kl"] / config.target_kl - 1))
            self.beta *= 1 + BETA_RATE * error
        if config.entropy_target is not None and not non_finite(entropy=means["entropy"]):
            self._last_entropy = means["entropy"]
            step = ENTROPY_STEP if self._last_entropy <= config.entropy_target else -ENTROPY_STEP
            self._entropy_coef = min(config.entropy_coef_max, max(0.0, self._entropy_coef + step))

    def metrics(self) -> dict[str, float]:
        """The coefficients that adapt."""
        beta = {} if self._config.target_kl is None else {"beta": self.beta}
        return beta if self._config.entropy_target is None else {**beta, "entropy_coef": self._entropy_coef}

    def state(self) -> dict[str, float | None]:
        return {"beta": self.beta, "entropy_coef": self._entropy_coef, "last_entropy": self._last_entropy}

    def load_state(self, state: dict[str, float | None]) -> None:
        beta, coef = state["beta"], state["entropy_coef"]
        assert beta is not None and coef is not None
        if self._config.target_kl is not None:  # a resumed run may change a fixed one
            self.beta = beta
        if self._config.entropy_target is not None:
            self._entropy_coef = coef
        self._last_entropy = state["last_entropy"]
