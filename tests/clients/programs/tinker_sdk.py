"""Cases of the official SDK: each line says what one found."""

import json
import sys

import tinker
from tinker import types

url, key, model = sys.argv[1:]


def show(case: str, found: object) -> None:
    print(json.dumps({"case": case, "found": found}), flush=True)


service = tinker.ServiceClient(base_url=url, api_key=key)
training = service.create_lora_training_client(base_model=model, rank=4, seed=3).result()
show("rank", training.get_info().lora_rank)
ids = training.get_tokenizer().encode("def f(x):\n    return x + 1\n")
prompt = types.ModelInput.from_ints(ids[:4])
inputs = {"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)}
datum = types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)

losses = []
for _ in range(4):
    gradient = training.forward_backward([datum], "cross_entropy")
    step = training.optim_step(types.AdamParams(learning_rate=1e-2))
    losses.append(gradient.result().metrics["loss:sum"])
    assert step.result().metrics
show("losses", losses)

sampler = training.save_weights_and_get_sampling_client().result()
params = types.SamplingParams(max_tokens=8, seed=5)
first, again = (sampler.sample(prompt, 3, params).result() for _ in range(2))
tokens = [each.tokens for each in first.sequences]
show("sampled twice alike", tokens == [each.tokens for each in again.sequences])
whole = types.ModelInput.from_ints(ids[:4] + tokens[0])
scored = sampler.compute_logprobs(whole).result()
logprobs = first.sequences[0].logprobs
show("logprobs differ", max(abs(a - b) for a, b in zip(scored[4:], logprobs, strict=True)))

saved = training.save_state("one").result()
other = service.create_training_client_from_state_with_optimizer(saved.path).result()
both = [each.forward([datum], "cross_entropy").result().metrics for each in (training, other)]
show("loaded alike", both[0] == both[1])
named = training.save_weights_for_sampler("named").result()
loaded = service.create_sampling_client(model_path=named.path).result()
repeated = loaded.sample(prompt, 3, params).result()
show("saved sampler alike", [each.tokens for each in repeated.sequences] == tokens)

scores = {"logprobs": scored[1:], "advantages": [0.5] * (whole.length - 1)}
inputs = {"target_tokens": whole.to_ints()[1:]} | scores
drawn = types.Datum(
    model_input=types.ModelInput.from_ints(whole.to_ints()[:-1]), loss_fn_inputs=inputs
)
for loss in ("importance_sampling", "ppo", "cispo", "dro"):
    result = training.forward_backward([drawn], loss).result()
    show(loss, len(result.loss_fn_outputs[0]["logprobs"].to_numpy()))


def custom(data, logprobs):
    return -sum(each.sum() for each in logprobs), {"own": 1.0}


show("custom", training.forward_backward_custom([datum], custom).result().metrics["own"])
training.optim_step(types.AdamParams()).result()
base = service.create_sampling_client(base_model=model).result()
show("base", len(base.sample(prompt, 1, params).result().sequences[0].tokens))
try:
    training.forward_backward([drawn], "stable_reinforce").result()
except tinker.BadRequestError as error:
    show("refused", error.body["error"]["param"])
