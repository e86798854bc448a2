"""`penstock deploy render|size`: manifests for Kubernetes, and what a run needs."""

import argparse
import sys

from penstock.infra.config.file import apply_overrides, read_toml
from penstock.infra.deploy.pods import Deployment
from penstock.infra.deploy.render import VALUES, render, secrets_needed, write
from penstock.infra.deploy.sizes import run_size
from penstock.infra.output import print_result, write_to
from penstock.infra.run.command import parse_new


def run(arguments: argparse.Namespace) -> int:
    """Run one action."""
    data = apply_overrides(read_toml(arguments.config), arguments.overrides)
    config = parse_new(data, str(arguments.config))
    if arguments.action == "size":
        print_result(run_size(config, replays=not arguments.no_replay), as_json=arguments.json)
        return 0
    deployment = Deployment(
        run_id=arguments.run_id,
        config=config,
        image=arguments.image,
        namespace=arguments.namespace,
        nats_account=arguments.nats_account,
        replays=not arguments.no_replay,
    )
    files = render(data, config, deployment)
    write(files, arguments.output)
    lines = [
        *(f"wrote {len(files)} files to {arguments.output}", *secrets_needed(deployment)),
        f"NATS: helm install nats nats/nats --values {arguments.output / VALUES}",
        f"then: kubectl apply --kustomize {arguments.output}",
    ]
    write_to(sys.stdout, "".join(f"{line}\n" for line in lines))
    return 0
