"""What each arm is worth to a user, estimated three ways from arms with recorded propensities.

With A the arm of a user, p the probability of it and Y the reward, for each arm a:
IPS is the mean of 1{A=a} Y / p; SNIPS divides by the mean of 1{A=a} / p instead of 1; the doubly
robust one is the mean of m + 1{A=a} (Y - m) / p, where m is the arm's mean before this user.
Source: Dudik, Langford and Li, "Doubly robust policy evaluation and learning", ICML 2011;
Swaminathan and Joachims, "The self-normalized estimator for counterfactual learning", NIPS 2015.
"""

from penstock.actors.gatekeeper.guards import Mean
from penstock.messages.gates import Arm


class ArmEstimates:
    """One arm's; fed with the users of both."""

    def __init__(self, arm: Arm) -> None:
        self._arm = arm
        self._num = 0
        self._weighted = 0.0
        self._weights = 0.0
        self._robust = 0.0
        self.rewards = Mean()
        """Of the users in the arm."""
        self.num_sessions = 0

    def add(self, arm: Arm, share: float, reward: float, num_sessions: int) -> None:
        """Take one user.

        Args:
            arm: Theirs.
            share: Probability of the candidate's arm.
            reward: Mean of their rated sessions.
            num_sessions: Rated.

        """
        model = self.rewards.value(0.5)
        self._num += 1
        self._robust += model
        if arm is not self._arm:
            return
        propensity = share if arm is Arm.CANDIDATE else 1.0 - share
        self._weighted += reward / propensity
        self._weights += 1.0 / propensity
        self._robust += (reward - model) / propensity
        self.rewards.add(reward)
        self.num_sessions += num_sessions

    @property
    def ips(self) -> float:
        """Unbiased; its scale varies with the number drawn into the arm."""
        return self._weighted / self._num if self._num else 0.0

    @property
    def snips(self) -> float:
        """Between the smallest and the largest reward."""
        return self._weighted / self._weights if self._weights else 0.0

    @property
    def doubly_robust(self) -> float:
        """Unbiased, with the variance of what the model leaves."""
        return self._robust / self._num if self._num else 0.0
