"""The gateway's own Prometheus metrics; the monitor's come with `/metrics` too."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class GatewayMetrics:
    """One registry a gateway, so that several live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "penstock_gateway_requests",
            "HTTP requests answered.",
            ["route", "status"],
            registry=self.registry,
        )
        self.in_progress = Gauge(
            "penstock_gateway_chat_in_progress", "Chat requests open.", registry=self.registry
        )
        self.first_token_s = Histogram(
            "penstock_gateway_first_token_seconds",
            "From the request to its first sampled token.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.duration_s = Histogram(
            "penstock_gateway_chat_seconds",
            "From the request to the end of its reply.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.tokens = Counter(
            "penstock_gateway_tokens", "Tokens by kind.", ["kind"], registry=self.registry
        )
        self.retries = Counter(
            "penstock_gateway_retries",
            "Attempts after the first, over all chat requests.",
            registry=self.registry,
        )
        self.unrecorded = Counter(
            "penstock_gateway_unrecorded",
            "Replies that went out although the log did not take their record.",
            registry=self.registry,
        )
        self.feedback = Counter(
            "penstock_gateway_feedback", "Feedback taken.", ["name"], registry=self.registry
        )

    def render(self) -> bytes:
        """Return the exposition text."""
        return generate_latest(self.registry)
