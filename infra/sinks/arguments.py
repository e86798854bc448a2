"""Arguments of `penstock sink`."""

import argparse
from pathlib import Path

from penstock.infra.sinks.sink import SINKS


def add_sink(parser: argparse.ArgumentParser) -> None:
    """Add what is the sink's own; the run follows."""
    parser.add_argument("name", choices=sorted(SINKS), help="where it is copied to")
    text = "folder of what it writes, and of how far it came (default: sinks/NAME in the run's)"
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help=text)
    text = "of otel: URL of an OTLP receiver (default: $OTEL_EXPORTER_OTLP_ENDPOINT)"
    parser.add_argument("--endpoint", default="", metavar="URL", help=text)
    text = "of otel: host off this machine that may get metrics and headers over http://"
    parser.add_argument(
        "--allow-plain-text", action="append", default=[], metavar="HOST", help=text
    )
