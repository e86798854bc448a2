"""An OTLP receiver: OpenTelemetry's own messages over HTTP."""

from typing import Any

from aiohttp import web


class OtlpReceiver:
    """Keeps what it is sent.

    Args:
        num_refused: Requests that are answered 503 first.
        status: Of every answer, if not 200.

    """

    def __init__(self, num_refused: int = 0, status: int = 200) -> None:
        self.points: list[tuple[str, int, int, str]] = []
        self.spans: list[Any] = []
        self._num_refused, self._status = num_refused, status

    async def __aenter__(self) -> "OtlpReceiver":
        app = web.Application(client_max_size=16 << 20)
        app.router.add_post("/v1/metrics", self._metrics)
        app.router.add_post("/v1/traces", self._traces)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._runner.cleanup()

    async def _metrics(self, request: web.Request) -> web.Response:
        from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as pb

        if refusal := self._refusal():
            return refusal
        message = pb.ExportMetricsServiceRequest.FromString(await request.read())
        [resource] = message.resource_metrics
        for metric in resource.scope_metrics[0].metrics:
            for point in metric.gauge.data_points:
                [version] = [a.value.int_value for a in point.attributes]
                value = repr(point.as_double)
                self.points.append((metric.name, version, point.time_unix_nano, value))
        return web.Response(body=pb.ExportMetricsServiceResponse().SerializeToString())

    async def _traces(self, request: web.Request) -> web.Response:
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb

        if refusal := self._refusal():
            return refusal
        message = pb.ExportTraceServiceRequest.FromString(await request.read())
        self.spans += message.resource_spans[0].scope_spans[0].spans
        return web.Response(body=pb.ExportTraceServiceResponse().SerializeToString())

    def _refusal(self) -> web.Response | None:
        if self._num_refused:
            self._num_refused -= 1
            return web.Response(status=503)
        return None if self._status == 200 else web.Response(status=self._status)
