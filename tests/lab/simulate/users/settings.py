"""What `python -m tests.lab simulate-users` assumes."""

import msgspec

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S


class UsersScenario(msgspec.Struct, frozen=True, kw_only=True):
    """The population and what it is confronted with."""

    seed: int = 0
    num_tenants: int = 6
    users_per_tenant: int = 4
    silent_share: float = 0.7
    """Requests whose user says nothing."""
    noise: float = 0.1
    """Share of ratings that are the opposite of what the user thinks."""
    delay_s_median: float = 1800.0
    delay_sigma: float = 2.0
    """Delays of feedback are log-normal, cut at the bounds below."""
    delay_s_min: float = 10.0
    delay_s_max: float = 3 * DAY_S
    num_days: int = 10
    """Virtual days of requests; feedback comes for as long as `delay_s_max` after them."""
    requests_per_hour: int = 18
    epoch_samples: int = 32
    """Samples that make a version, or as many as come in `epoch_s`."""
    epoch_s: float = 5 * HOUR_S
    midtrain_tokens: int = 120_000
    learning_rate: float = 5e-4
    num_attack_seeds: int = 12
    num_attacked: int = 20
    """Tenants of the part `attack`."""
    attacked_users: int = 5
    """Users of each."""
    num_rounds: int = 32
    """Rounds of requests in it, about one version each."""
    attack_ratio: int = 5
    """Feedback of the attacker, in multiples of what all honest users give."""
    num_experiments: int = 1000
    """A/A experiments of the gates."""
    latency_s: float = 150.0
    """Real time for which users ask and rate."""
    latency_pause_s: float = 0.2
    """Between two of them."""
    latency_epoch_samples: int = 8
    latency_tail_s: float = 90.0
    """Real time after that, in which users go on for the last decisions of the gates."""
