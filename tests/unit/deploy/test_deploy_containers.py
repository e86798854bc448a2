"""The Containerfiles: one for each image that manifests name, of files and extras that exist.

No image is built here.
"""

import re
import tomllib
from pathlib import Path

import pytest
from tests.unit.deploy.rendering import CONFIG

from penstock.infra.config.file import load_config
from penstock.infra.deploy.layout import workloads
from penstock.infra.deploy.pods import USER_ID, WORK_DIR, Deployment, image_suffix

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "infra" / "containers").glob("*.Containerfile"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize(
    "overrides",
    [[], ["generator.engine=vllm"], ["generator.engine=vllm", "generator.device=cuda"],
     ["trainer.engine=ranks"]],
)  # fmt: skip
def test_every_image_that_pods_name_has_a_containerfile(overrides):
    config = load_config(CONFIG, overrides)
    deployment = Deployment(
        run_id="r", config=config, image="host:5000/a/penstock:1", namespace="n", nats_account="$G"
    )
    for workload in workloads(config):
        suffix = image_suffix(workload, config)
        image = f"host:5000/a/penstock{suffix and '-'}{suffix}:1"
        assert deployment.image_of(suffix) == image
        assert f"{suffix or 'core'}.Containerfile" in {path.name for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_containerfile_installs_what_exists(path):
    text = path.read_text()
    extras = re.findall(r"/opt/penstock\[([a-z0-9,]+)\]", text)
    assert extras and set(extras[0].split(",")) <= PROJECT["optional-dependencies"].keys()
    for name in re.findall(r"/opt/penstock/([\w./-]+\.(?:sh|txt))", text):
        assert (ROOT / name).is_file()
    for version in re.findall(r"(torch==[\w.]+)", text):
        assert version in PROJECT["dependencies"]
    assert f"WORKDIR {WORK_DIR}" in text
    assert ("sandbox" in path.name) != (f"USER {USER_ID}:{USER_ID}" in text)
