"""OpenTelemetry: metrics and spans to an OTLP receiver, as protobuf over HTTP.

A batch is sent until the receiver has taken it; then the cursor moves. A sink that is killed in
between sends the batch again, with the same ids and times: the same data, not more of it.
"""

import importlib
import logging
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote

from penstock.envs.outbound import LOST, Outbound
from penstock.infra.output import write_to
from penstock.infra.sinks.rows import Row
from penstock.infra.sinks.sink import Cursor, SinkSettings, read_cursor, write_cursor
from penstock.infra.sinks.traces import TraceSpan
from penstock.messages.base import Stream
from penstock.messages.errors import ConfigError
from penstock.messages.retries import RetryPolicy, with_retries

log = logging.getLogger(__name__)
_PROTO = "opentelemetry.proto.collector"
_metrics: Any = importlib.import_module(f"{_PROTO}.metrics.v1.metrics_service_pb2")
_traces: Any = importlib.import_module(f"{_PROTO}.trace.v1.trace_service_pb2")
_protobuf: Any = importlib.import_module("google.protobuf.message")
ROWS_MAX, SPANS_MAX = 64, 1024
"""Of one request: receivers refuse those of more than some megabytes."""
REPLY_BYTES_MAX = 1 << 20
REQUEST_S_MAX = 30.0
RETRY = RetryPolicy(pause_s=1.0, pause_s_max=10.0, deadline_s=120.0)
_BUSY = {429, 502, 503, 504}
"""What OTLP has a client send again."""
_ERROR = 2
"""STATUS_CODE_ERROR."""


class OtelSink:
    """Sends batches to `<endpoint>/v1/metrics` and `<endpoint>/v1/traces`."""

    def __init__(self, settings: SinkSettings) -> None:
        endpoint = settings.endpoint or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
        if not endpoint.startswith(("http://", "https://")):
            text = "expected the URL of an OTLP receiver over HTTP, e.g. http://localhost:4318"
            raise ConfigError(f"--endpoint: {text}, got {endpoint!r}")
        headers = _own_headers()
        self._receiver = Outbound(
            endpoint,
            field="--endpoint",
            headers=headers,
            secrets=headers.values(),
            allowed=settings.allow_plain_text,
        )
        self._endpoint = self._receiver.url
        self._run_id, self._folder = settings.run_id, settings.folder
        self._cursor = read_cursor(self._folder) or Cursor()

    @property
    def after(self) -> dict[Stream, int]:
        """See `Sink.after`."""
        return self._cursor.after

    async def write(
        self, rows: Sequence[Row], spans: Sequence[TraceSpan], after: dict[Stream, int]
    ) -> None:
        """See `Sink.write`."""
        for start in range(0, len(rows), ROWS_MAX):
            request = self._metrics_request(rows[start : start + ROWS_MAX])
            await self._send("metrics", request, _metrics.ExportMetricsServiceResponse())
        for start in range(0, len(spans), SPANS_MAX):
            request = self._traces_request(spans[start : start + SPANS_MAX])
            await self._send("traces", request, _traces.ExportTraceServiceResponse())
        self._cursor = Cursor(after=after)
        write_cursor(self._folder, self._cursor)

    async def close(self) -> None:
        """See `Sink.close`."""

    def _metrics_request(self, rows: Sequence[Row]) -> Any:
        """One gauge per name, with a point per row."""
        request = _metrics.ExportMetricsServiceRequest()
        [scoped] = self._scoped(request.resource_metrics, "scope_metrics")
        gauges: defaultdict[str, Any] = defaultdict(scoped.metrics.add)
        for row in rows:
            for name, value in row.values.items():
                metric = gauges[name]
                metric.name = f"penstock.{name.replace('/', '.')}"
                point = metric.gauge.data_points.add()
                point.time_unix_nano, point.as_double = _nanoseconds(row.at), value
                _set(point.attributes, {"penstock.policy_version": row.step})
        return request

    def _traces_request(self, spans: Sequence[TraceSpan]) -> Any:
        request = _traces.ExportTraceServiceRequest()
        [scoped] = self._scoped(request.resource_spans, "scope_spans")
        for span in spans:
            message = scoped.spans.add()
            message.name, message.kind = span.name, 1  # SPAN_KIND_INTERNAL
            message.trace_id, message.span_id = span.trace_id, span.span_id
            message.parent_span_id = span.parent_id
            message.start_time_unix_nano = _nanoseconds(span.start_s)
            message.end_time_unix_nano = _nanoseconds(span.end_s)
            if span.is_failed:
                message.status.code = _ERROR
            _set(message.attributes, span.attributes)
        return request

    def _scoped(self, resources: Any, scopes: str) -> list[Any]:
        resource = resources.add()
        names = {"service.name": "penstock", "service.instance.id": self._run_id}
        _set(resource.resource.attributes, names)
        scope = getattr(resource, scopes).add()
        scope.scope.name = "penstock"
        return [scope]

    async def _send(self, signal: str, request: Any, reply: Any) -> None:
        data = request.SerializeToString()

        async def attempt() -> bytes:
            return await self._post(f"/v1/{signal}", data)

        body = await with_retries(attempt, RETRY, retry_on=(*LOST, OSError), log=log)
        try:
            reply.ParseFromString(body)
        except _protobuf.DecodeError as error:
            raise ConfigError(f"--endpoint: {self._endpoint}: no OTLP receiver: {error}") from error
        if message := reply.partial_success.error_message:  # Sent again it would be refused again.
            write_to(
                sys.stderr,
                f"warning: the receiver left out some {signal}: {self._receiver.hide(message)}\n",
            )

    async def _post(self, path: str, data: bytes) -> bytes:
        headers = {"Content-Type": "application/x-protobuf"}
        status, body = await self._receiver.post(
            path, REQUEST_S_MAX, REPLY_BYTES_MAX, data=data, headers=headers
        )
        if status in _BUSY:
            raise ConnectionError(f"{self._endpoint}{path}: status {status}")
        if status != 200:
            text = f"expected status 200, got {status}"
            raise ConfigError(f"--endpoint: {self._endpoint}{path}: {text}")
        return body


def _own_headers() -> dict[str, str]:
    """Return the headers of `OTEL_EXPORTER_OTLP_HEADERS`: `name=value`, by comma, percent-encoded.

    Raises:
        ConfigError: An entry has no name.

    """
    headers: dict[str, str] = {}
    for entry in filter(None, os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", "").split(",")):
        name, separator, value = entry.partition("=")
        if not separator or not name.strip():
            raise ConfigError("OTEL_EXPORTER_OTLP_HEADERS: expected name=value, by comma")
        headers[name.strip()] = unquote(value.strip())
    return headers


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _set(attributes: Any, values: dict[str, Any]) -> None:
    for key, value in values.items():
        attribute = attributes.add()
        attribute.key = key
        if isinstance(value, int):
            attribute.value.int_value = value
        else:
            attribute.value.string_value = value
