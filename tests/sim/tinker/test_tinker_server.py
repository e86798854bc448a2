"""`penstock tinker` over plain HTTP: what calls do, and that log, restart and replay agree."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from penstock.infra.tinker.book import NoSuchError
from penstock.infra.tinker.model import TrainedModel
from penstock.infra.tinker.protobuf import field

from .served import PROMPT, World, base, datum, forward_backward, outputs, plain

STEP = {"model_id": "x", "seq_id": 1, "adam_params": {}}


async def trained(client, *, num_steps: int = 3) -> tuple[str, str, list[float]]:
    session = await client.session()
    model, losses = await client.model(session), []
    for step in range(num_steps):
        body = forward_backward(model, 2 * step + 1, [plain(), plain(PROMPT[::-1])])
        losses.append(outputs(await client.call("forward_backward", body))[0])
        await client.step(model, 2 * step + 2)
    return session, model, losses


async def test_a_session_trains_saves_samples_and_loads():
    world = World()
    async with world.serving() as (client, _):
        session, model, losses = await trained(client)
        assert losses == sorted(losses, reverse=True)
        saved = await client.call("save_weights", {"model_id": model, "seq_id": 7, "path": "one"})
        assert saved["path"] == f"tinker://{model}/weights/one"
        body = {"model_id": model, "seq_id": 8, "sampling_session_seq_id": 0}
        sampler = (await client.call("save_weights_for_sampler", body))["sampling_session_id"]
        sampled = await client.sample(sampler, 0, params={"seed": 3})
        assert sampled == await client.sample(sampler, 1, params={"seed": 3})
        assert sampled[0] != sampled[1]
        # What the sampler says of its tokens, the model says of them.
        tokens, logprobs, _ = sampled[0]
        whole = PROMPT + tokens
        own = forward_backward(model, 9, [plain(whole)], forward_only=True)
        loss, scored = outputs(await client.call("forward_backward", own))
        assert np.allclose(scored[-len(tokens) :], logprobs, atol=1e-3)
        load = {"session_id": session, "model_seq_id": 1, "path": saved["path"], "optimizer": True}
        other = (await client.call("load_weights", load))["model_id"]
        again = forward_backward(other, 1, [plain(whole)], forward_only=True)
        assert outputs(await client.call("forward_backward", again))[0] == loss
        status, listed = await client.get(f"training_runs/{model}/checkpoints")
        kinds = [each["checkpoint_type"] for each in listed["checkpoints"]]
        assert status == 200
        assert kinds == ["training", "sampler"]
    report = await world.replay()
    assert report["identical"], report["first_difference"]
    assert report["calls"] == 14
    # Another base: the replay can fail.
    assert not (await world.replay(seed=1))["identical"]


async def test_a_loss_and_its_gradient_are_those_of_the_formula():
    """PPO by hand: the first step's gradient norm is autograd's, through adapters of rank 4."""
    world = World()
    targets, advantages = PROMPT[1:], [0.5, -1.0, 2.0, 0.0, 1.0, -0.5, 0.25]
    async with world.serving() as (client, actor):
        model = await client.model(await client.session())
        old = [-6.0, -6.2, -6.5, -6.3, -5.0, -7.5, -6.3]
        one = datum(PROMPT[:-1], target_tokens=targets, logprobs=old, advantages=advantages)
        body = forward_backward(model, 1, [one], "ppo", clip_high_threshold=1.1)
        loss, scored = outputs(await client.call("forward_backward", body))
        policy = actor._executor.models[model]._learner.policy
        output = policy(torch.tensor(PROMPT[:-1]), [7])
        logprobs = F.log_softmax(policy.logits(output.hidden), -1)[range(7), targets]
        assert np.allclose(scored, logprobs.detach(), atol=1e-5)
        ratio, gain = (logprobs - torch.tensor(old)).exp(), torch.tensor(advantages)
        by_hand = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.1) * gain).sum()
        assert loss == pytest.approx(by_hand.item(), abs=1e-5)
        own = [each for each in policy.parameters() if each.requires_grad]
        gradients = torch.autograd.grad(by_hand, own)
        norm = math.sqrt(sum(float(each.square().sum()) for each in gradients))
        metrics = (await client.step(model, 2))["metrics"]
        assert metrics["unclipped_grad_l2:mean"] == pytest.approx(norm, rel=1e-3)


async def test_several_targets_per_position():
    world = World()
    async with world.serving() as (client, _):
        model = await client.model(await client.session())
        pairs = [[token, token + 1] for token in PROMPT[1:]]
        weights = [[1.0, 0.5]] * 7
        wide = datum(PROMPT[:-1], target_tokens=pairs, weights=weights)
        body = forward_backward(model, 1, [wide], forward_only=True)
        loss, scored = outputs(await client.call("forward_backward", body))
        assert scored.size == 14
        assert loss == pytest.approx(float(-(scored.reshape(7, 2) * weights).sum()), abs=1e-4)


@pytest.mark.parametrize("keep_steps", [1, 2, 100])
async def test_a_killed_server_goes_on_from_the_log(keep_steps):
    world, whole = World(keep_steps=keep_steps), World()
    digests = []
    async with whole.serving() as (client, actor):
        _, model, _ = await trained(client, num_steps=4)
        digests = actor._executor.models[model].digests()
    async with world.serving() as (client, _):
        session = await client.session()
        model = await client.model(session)
        for step in range(3):
            body = forward_backward(model, 2 * step + 1, [plain(), plain(PROMPT[::-1])])
            first = await client.call("forward_backward", body)
            await client.step(model, 2 * step + 2)
        # Killed between the gradient and its step, with one call that nobody has answered.
        body = forward_backward(model, 7, [plain(), plain(PROMPT[::-1])])
        await client.post("forward_backward", body)
    async with world.serving() as (client, actor):
        # A client that repeats its request gets the answer to the first.
        await client.call("forward_backward", body)
        assert await client.answer(f"{model}:5") == first
        await client.step(model, 8)
        assert actor._executor.models[model].digests() == digests
    report = await world.replay()
    assert report["identical"], report["first_difference"]


async def test_more_models_and_samplers_than_fit_into_memory():
    world = World(num_models_max=1, num_samplers_max=1)
    async with world.serving() as (client, actor):
        session = await client.session()
        models = [await client.model(session, number, seed=number) for number in range(3)]
        found = {}
        for turn in range(2):
            for index, model in enumerate(models):
                body = forward_backward(model, 3 * turn + 1, [plain()])
                found[model] = outputs(await client.call("forward_backward", body))[0]
                await client.step(model, 3 * turn + 2)
                body = {"model_id": model, "seq_id": 3 * turn + 3}
                body["sampling_session_seq_id"] = 10 * turn + index
                made = await client.call("save_weights_for_sampler", body)
                await client.sample(made["sampling_session_id"], 0)
        assert len(set(found.values())) == 3
        assert len(actor._executor.models) == 1
    assert (await world.replay())["identical"]


async def test_a_text_or_a_token_ends_a_sequence():
    world = World()
    async with world.serving() as (client, actor):
        session = await client.session()
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        _, made = await client.post("create_sampling_session", body)
        sampler = made["sampling_session_id"]
        free = (await client.sample(sampler, 0, params={"seed": 1, "stop": []}))[0]
        assert len(free[0]) == 6
        assert not free[2]
        by_id = await client.sample(sampler, 1, params={"seed": 1, "stop": [free[0][2]]})
        text = base().tokenizer.decode_bytes([free[0][2]]).decode(errors="ignore")
        assert by_id[0][0] == free[0][:3]
        assert by_id[0][2]
        if text:
            by_text = await client.sample(sampler, 2, params={"seed": 1, "stop": text})
            assert free[0][: len(by_text[0][0])] == by_text[0][0]
            assert by_text[0][2]
        num_calls = len(actor.book.targets[sampler].numbers)
    report = await world.replay()
    assert report["identical"], report["first_difference"]
    assert report["calls"] == num_calls


async def test_other_tenants_have_nothing_of_it():
    world = World()
    async with world.serving() as (client, _):
        session, model, _ = await trained(client, num_steps=1)
        saved = await client.call("save_weights", {"model_id": model, "seq_id": 3, "path": "one"})
        other = client.of("tml-psk-b")
        own = await other.session()
        load = {"session_id": own, "model_seq_id": 0, "path": saved["path"], "optimizer": False}
        tries = {
            "session_heartbeat": {"session_id": session},
            "get_info": {"model_id": model},
            "optim_step": STEP | {"model_id": model, "seq_id": 9},
            "save_weights": {"model_id": model, "seq_id": 9},
            "retrieve_future": {"request_id": f"{model}:1"},
            "forward_backward": forward_backward(model, 9, [plain()]),
            "load_weights": load,
        }
        for path, body in tries.items():
            status, found = await other.post(path, body)
            assert (path, status) == (path, 404), found
        assert (await other.get(f"training_runs/{model}/checkpoints"))[0] == 404
        assert (await client.of("tml-wrong").post("telemetry", {}))[0] == 401
        status, found = await client.of("tml-psk-silent").post("telemetry", {})
        assert (status, found["error"]["code"]) == (403, "storage_consent")
        slow = client.of("psk-slow")
        await slow.session()
        status, found = await slow.post("create_session", {"tags": [], "sdk_version": "0"})
        assert (status, found["error"]["code"]) == (429, "rate_limit_exceeded")


def long(count):
    return datum([5] * count, target_tokens=[5] * count, weights=[1.0] * count)


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        ("forward_backward", {"loss": "gspo"}, "loss_fn"),
        ("forward_backward", {"beta": 1.0}, "loss_fn_config"),
        ("forward_backward", {"data": []}, "data"),
        ("forward_backward", {"data": [long(129)]}, "data[0].model_input"),
        ("forward_backward", {"data": [long(0)]}, "data[0].model_input"),
        ("forward_backward", {"data": [plain([5, 6, 544])]}, "data[0].target_tokens"),
        ("forward_backward", {"data": [plain([544, 6, 5])]}, "data[0].model_input"),
        (
            "forward_backward",
            {"data": [datum([5], target_tokens=[6])]},
            "data[0].loss_fn_inputs",
        ),
        (
            "forward_backward",
            {"data": [datum([5], target_tokens=[6], weights=[math.nan])]},
            "data[0].loss_fn_inputs.weights",
        ),
        (
            "forward_backward",
            {"data": [datum([5, 6], target_tokens=[6, 7], weights=[1.0])]},
            "data[0].loss_fn_inputs.weights",
        ),
        ("optim_step", {"adam_params": {"beta1": 1.0}}, "adam_params.beta1"),
        ("optim_step", {"adam_params": {"unknown": 1}}, "adam_params.unknown"),
        ("optim_step", {"optimizer_params": {"type": "dimuon"}}, None),
        ("optim_step", {"seq_id": 0}, "seq_id"),
        ("save_weights", {"path": "../x"}, "path"),
        ("save_weights", {"overwrite": True}, "overwrite"),
        ("create_model", {"lora_config": {"rank": 999}}, "lora_config.rank"),
        ("create_model", {"lora_config": {"rank": 0}}, "lora_config.rank"),
        ("create_model", {"base_model": "other"}, "base_model"),
        (
            "create_model",
            {"lora_config": {"rank": 1, "train_mlp": False, "train_attn": False}},
            "lora_config.train_attn",
        ),
        ("asample", {"num_samples": 0}, "num_samples"),
        ("asample", {"prompt": {"chunks": []}}, "prompt"),
        ("asample", {"prompt": {"chunks": [{"tokens": [544]}]}}, "prompt"),
        ("asample", {"topk_prompt_logprobs": 2}, "topk_prompt_logprobs"),
    ],
)
async def test_a_wrong_call_is_refused_by_its_field_and_never_stored(path, change, param):
    world = World()
    async with world.serving() as (client, _):
        session = await client.session()
        model = await client.model(session)
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        _, made = await client.post("create_sampling_session", body)
        sampling = {"prompt": {"chunks": [{"tokens": PROMPT}]}, "sampling_params": {}, "seq_id": 0}
        lora = {"lora_config": {"rank": 1}, "base_model": "tiny"}
        bodies = {
            "optim_step": {"model_id": model, "seq_id": 1, "adam_params": {}},
            "save_weights": {"model_id": model, "seq_id": 1, "path": "x"},
            "create_model": {"session_id": session, "model_seq_id": 1} | lora,
            "asample": sampling | {"sampling_session_id": made["sampling_session_id"]},
        }
        if path == "forward_backward":
            body = forward_backward(model, 1, **({"data": [plain()]} | change))
        else:
            body = bodies[path] | change
        before = world.stored()
        status, found = await client.post(path, body)
        assert status == 400, found
        assert found["error"]["param"] == param or param is None
        assert world.stored() == before


@pytest.mark.parametrize(
    "body",
    [b"\xff", b"\x0a\xff\xff\xff\xff\x0f", b"\x0b", field(3, b"\x0a\x05"), field(1, 7), b"{}"],
)
async def test_bytes_that_are_no_request(body):
    world = World()
    async with world.serving() as (client, _):
        await client.session()
        status, found = await client.post("forward_backward", body)
        assert status in {400, 404}, found


async def test_a_step_without_a_finite_gradient_ends_the_gradient_alone():
    world = World()
    async with world.serving() as (client, actor):
        model = await client.model(await client.session())
        huge = datum([5, 6], target_tokens=[6, 7], weights=[3e38, 3e38])
        await client.call("forward_backward", forward_backward(model, 1, [huge]))
        failed = await client.step(model, 2)
        assert failed["category"] == "user"
        assert "norm" in failed["error"]
        await client.call("forward_backward", forward_backward(model, 3, [plain()]))
        assert "metrics" in await client.step(model, 4)
        weights, _ = actor._executor.models[model].digests()
    report = await world.replay()
    assert report["identical"], report["first_difference"]
    assert report["weights_digests"][model] == weights


async def test_a_server_starts_again_after_calls_with_large_bodies():
    world = World()
    async with world.serving() as (client, _):
        session = await client.session()
        lora = {"rank": 2, "seed": 1}
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": lora}
        large = {"note": "x" * 700_000}
        model = (await client.call("create_model", body | {"user_metadata": large}))["model_id"]
    async with world.serving() as (client, _):
        assert (await client.post("get_info", {"model_id": model}))[1]["lora_rank"] == 2
        assert "metrics" in await client.step(model, 1)
    report = await world.replay()
    assert report["identical"], report["first_difference"]


@pytest.mark.parametrize("number", [2**31, 2**60, 2**69])
async def test_a_number_that_no_log_can_hold_is_refused(number):
    world = World()
    async with world.serving() as (client, _):
        model = await client.model(await client.session())
        status, found = await client.post(
            "forward_backward", forward_backward(model, number, [plain()])
        )
        assert (status, found["error"]["param"]) == (400, "seq_id")
    async with world.serving() as (client, _):
        assert "metrics" in await client.step(model, 1)


@pytest.mark.parametrize("shape", [[1] * 70, [2**63] * 40, [2**63]])
async def test_a_tensor_of_an_impossible_shape_is_refused(shape):
    world = World()
    async with world.serving() as (client, _):
        model = await client.model(await client.session())
        values = field(1, b"\0" * 4) + field(3, 1) + b"".join(field(4, each) for each in shape)
        one = field(1, field(1, field(1, b"\x05\0\0\0")))
        one += field(2, field(1, "weights") + field(2, values))
        status, found = await client.post("forward_backward", forward_backward(model, 1, [one]))
        assert status == 400, found


async def test_a_model_that_could_not_be_made_ends_no_server():
    world = World()
    async with world.serving() as (client, actor):
        session = await client.session()
        model = await client.model(session)
        saved = await client.call("save_weights", {"model_id": model, "seq_id": 1, "path": "x"})

        async def gone(path):
            raise NoSuchError(f"path: there are no weights at {path!r}")

        actor._executor._read_saved = gone
        body = {"session_id": session, "model_seq_id": 1, "optimizer": False}
        _, found = await client.post("load_weights", body | {"path": saved["path"]})
        assert "no weights" in (await client.answer(found["request_id"]))["error"]
        for seq in (1, 2):
            assert "error" in await client.step(found["model_id"], seq)
        assert "metrics" in await client.step(model, 2)
    report = await world.replay()
    assert report["identical"], report["first_difference"]


async def test_a_model_whose_state_is_damaged_costs_its_own_calls():
    world = World(keep_steps=1)
    async with world.serving() as (client, _):
        session = await client.session()
        models = [await client.model(session, number) for number in range(2)]
        for model in models:
            await client.call("forward_backward", forward_backward(model, 1, [plain()]))
            await client.step(model, 2)
    async with world.serving() as (client, _):
        load = TrainedModel.load

        def damaged(self, data, **options):
            load(self, data, **options)
            with torch.no_grad():
                next(iter(self._learner.parameters.values())).add_(1.0)

        TrainedModel.load = damaged
        try:
            assert "differs" in (await client.step(models[0], 3))["error"]
        finally:
            TrainedModel.load = load
        assert "metrics" in await client.step(models[1], 3)


async def test_samplers_do_not_draft():
    """They are shared by tenants: drafts of one's tokens would quicken another's reply."""
    world = World()
    async with world.serving() as (client, actor):
        body = {"session_id": await client.session(), "sampling_session_seq_id": 0}
        _, made = await client.post("create_sampling_session", body | {"base_model": "tiny"})
        for seq in range(2):
            await client.sample(made["sampling_session_id"], seq, params={"seed": 1, "stop": []})
        (sampler,) = actor._executor._samplers.values()
        assert sampler._engine.metrics().num_drafted_tokens == 0
