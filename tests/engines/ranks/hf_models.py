"""Tiny models that transformers makes, and what it computes: run in the environment of `ranks`.

python hf_models.py make KIND... FOLDER   a folder of each kind inside that one
python hf_models.py logits FOLDER...      a line of JSON for each
"""

import json
import sys

import torch
import transformers
from tests.engines.ranks.hf_families import FAMILIES, SHAPE


def config_of(kind):
    name, own = FAMILIES[kind]
    return getattr(transformers, name)(**(SHAPE | own))


def make(*arguments):
    *kinds, folder = arguments
    for kind in kinds:
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config_of(kind)).float()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape), alpha=0.05)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.normal_(std=0.1)
        model.save_pretrained(f"{folder}/{kind}")


@torch.no_grad()
def logits(*folders):
    torch.set_num_threads(1)
    for folder in folders:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        print(json.dumps(model.eval()(torch.arange(3, 51)[None]).logits[0].tolist()))


if __name__ == "__main__":
    {"make": make, "logits": logits}[sys.argv[1]](*sys.argv[2:])
