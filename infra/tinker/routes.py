"""The SDK's routes: bodies checked, then calls accepted and answers waited for."""

import secrets
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import numpy as np
from aiohttp import web
from aiohttp.typedefs import Middleware

from penstock.gateway.answering import answering
from penstock.gateway.errors import ApiError, invalid
from penstock.gateway.keys import KeySpec
from penstock.gateway.request_body import read_whole
from penstock.gateway.routes.body import decode_body
from penstock.infra.tinker import requests
from penstock.infra.tinker.book import CallTarget, NoSuchError, model_id, sampler_id, targets_of
from penstock.infra.tinker.losses import LOSSES
from penstock.infra.tinker.server import ClientCall, TinkerServer
from penstock.infra.tinker.wire import Datum, ForwardBackward, read_forward_backward
from penstock.messages.errors import CodecError
from penstock.messages.requests.tinker import TinkerKind

Reply = dict[str, Any]
Answer = Callable[[TinkerServer, KeySpec, bytes], Awaitable[Reply]]
_PROTOBUF = "application/x-protobuf"
_NUM_DATA_MAX = 1024
_UNEMBED = (
    "train_unembed: the output matrix is not adapted here; of models with experts, attention alone"
)
_CLIENT_CONFIG = {
    "pjwt_auth_enabled": False,
    # One call of a model after the other, so that the log has the client's order.
    "parallel_fwdbwd_chunks": False,
    "proto_compress_fwdbwd": False,
    "sample_use_retrieve_futures": False,
    "custom_loss_server_side": False,
    "sample_join_sampling_session": True,
    "use_pyqwest_transport": False,
}


async def _client_config(server: TinkerServer, key: KeySpec, body: bytes) -> Reply:
    return dict(_CLIENT_CONFIG)


async def _nothing(server: TinkerServer, key: KeySpec, body: bytes) -> Reply:
    """Take telemetry and forget it."""
    return {"status": "accepted"}


async def _dynamic_config(server: TinkerServer, key: KeySpec, body: bytes) -> Reply:
    return {"refresh_interval_sec": 300, "sample_cancel_enabled": False}


async def _create_session(server: TinkerServer, key: KeySpec, body: bytes) -> Reply:
    decode_body(body, requests.CreateSessionBody)
    session = server.new_session()
    await server.accept(key, ClientCall(TinkerKind.SESSION, session, "", 0, body))
    return {"type": "create_session", "session_id": session, "warning_message": _UNEMBED}


async def _heartbeat(server: TinkerServer, key: KeySpec, body: bytes) -> Reply:
    _check_session(server, key, decode_body(body, requests.HeartbeatBody).session_id)
    return {"type": "session_heartbeat"}


def _check_session(server: TinkerServer, key: KeySpec, session_id: str) -> None:
    owner = server.book.sessions.get(session_id)
    if owner is None or owner.tenant != key.tenant:
        raise NoSuchError(f"session_id: this key's tenant has no session {session_id!r}")


def _check_base(server: TinkerServer, name: str | None) -> None:
    if name is not None and name not in server.names:
        raise invalid(f"expected one of {', '.join(server.names)}, got {name!r}", "base_model")


def _check_new_model(server: TinkerServer, key: KeySpec) -> None:
    most = server.config.tenant_models_max
    if server.book.num_models(key.tenant) >= most:
        raise ApiError(429, "too_many_models", f"the tenant has {most} models already")


async def _create_model(server: TinkerServer, key: KeySpec, body: bytes) -> Reply:
    asked = decode_body(body, requests.ModelBody)
    _check_session(server, key, asked.session_id)
    _check_base(server, asked.base_model)
    lora = asked.lora_config
    if lora.rank > server.config.rank_max:
        text = f"expected at most {server.config.rank_max}, got {lora.rank}"
        raise invalid(text, "lora_config.rank")
    if not targets_of(lora, is_dense=server.base.policy.config.is_dense):
        raise invalid("expected true: nothing would be trained", "lora_config.train_attn")
    name = model_id(asked.session_id, asked.model_seq_id)
    if name not in server.book.targets:
        _check_new_model(server, key)
    call = ClientCall(TinkerKind.MODEL, asked.session_id, name, 0, body, lora.seed)
    return await _accepted(server, key, call)


async def _accepted(server: TinkerServer, key: KeySpec, call: ClientCall) -> Reply:
    reply: Reply = {"request_id": await server.accept(key, call)}
    return reply if call.kind is TinkerKind.SAMPLE else reply | {"model_id": call.target}


def _model(server: TinkerServer, key: KeySpec, name: str) -> CallTarget:
    target = server.book.target(name, key.tenant, "model_id")
    if target.lora is None:
        raise NoSuchError(f"model_id: expected a model, got the sampler {name!r}")
    return target


async def _get_info(server: TinkerServer, key: KeySpec, body: bytes) -> Reply:
    name = decode_body(body, requests.ModelIdBody).model_id
    lora = _model(server, key, name).lora
    assert lora is not None, "_model checked"
    data = {"arch": "", "model_name": server.names[0], "tokenizer_id": server.names[-1]}
    return {"type": "get_info", "model_id": name, "model_name": server.names[0], "is_lora": True,
            "lora_rank": lora.rank, "model_data": data}  # fmt: skip


async def _forward_backward(server: TinkerServer, key: KeySpec, body: bytes) -> Reply:
    try:
        asked = read_forward_backward(body)
    except CodecError as error:
        raise ApiError(400, "invalid_body", str(error)) from error
    _check_loss(asked)
    for index, datum in enumerate(asked.data):
        _check_datum(server, datum, asked.loss_fn, f"data[{index}]")
    count = sum(each.tokens.size for each in asked.data)
    kind = TinkerKind.FORWARD_BACKWARD
    call = ClientCall(kind, "", asked.model_id, asked.seq_id, body, num_tokens=count)
    return await _of_model(server, key, call)


def _check_loss(asked: ForwardBackward) -> None:
    if asked.loss_fn not in LOSSES:
        raise invalid(f"expected one of {', '.join(LOSSES)}, got {asked.loss_fn!r}", "loss_fn")
    for name, value in asked.settings.items():
        known = LOSSES[asked.loss_fn].settings
        if name not in known or not np.isfinite(value):
            text = f"{asked.loss_fn} takes finite values of {', '.join(known) or 'no setting'}"
            raise invalid(f"{text}, got {name}", "loss_fn_config")
    if not 1 <= len(asked.data) <= _NUM_DATA_MAX:
        raise invalid(f"expected 1 to {_NUM_DATA_MAX}, got {len(asked.data)}", "data")


def _check_datum(server: TinkerServer, datum: Datum, loss: str, where: str) -> None:
    length, vocab = datum.tokens.size, server.base.policy.config.vocab_size
    if not 1 <= length <= server.base.context:
        text = f"expected 1 to {server.base.context} tokens, got {length}"
        raise invalid(text, f"{where}.model_input")
    expected = {"target_tokens", *LOSSES[loss].inputs}
    if datum.inputs.keys() != expected:
        text = f"{loss} takes {', '.join(sorted(expected))}, got {', '.join(sorted(datum.inputs))}"
        raise invalid(text, f"{where}.loss_fn_inputs")
    shape = datum.inputs["target_tokens"].shape
    for name, values in datum.inputs.items():
        field = f"{where}.loss_fn_inputs.{name}"
        if values.shape != shape or shape[:1] != (length,) or len(shape) > 2 or not values.size:
            text = f"expected the shape ({length},) or ({length}, K) of target_tokens"
            raise invalid(f"{text}, got {values.shape}", field)
        if not np.isfinite(values).all():
            raise invalid("expected finite values", field)
    for name, ids in (
        ("model_input", datum.tokens),
        ("target_tokens", datum.inputs["target_tokens"]),
    ):
        if ids.dtype.kind != "i" or int(ids.min()) < 0 or int(ids.max()) >= vocab:
            raise invalid(f"expected token ids below {vocab}", f"{where}.{name}")


async def _optim_step(server: TinkerServer, key: KeySpec, body: bytes) -> Reply:
    asked = decode_body(body, requests.StepBody)
    call = ClientCall(TinkerKind.OPTIM_STEP, "", asked.model_id, asked.seq_id, body)
    return await _of_model(server, key, call)


async def _of_model(server: TinkerServer, key: KeySpec, call: ClientCall) -> Reply:
    """Accept a call of a model; the model determines the session."""
    target = _model(server, key, call.target)
    # Protobuf's numbers are larger than those that an event can hold.
    if not 1 <= call.number < requests.SEQ_MAX:
        text = f"expected 1 to {requests.SEQ_MAX - 1}, got {call.number}"
        raise invalid(text, "seq_id")
    return await _accepted(server, key, call._replace(session_id=target.session_id))


async def _save(server: TinkerServer, key: KeySpec, body: bytes) -> Reply:
    asked = decode_body(body, requests.SaveStateBody)
    _check_free(server, asked, "weights")
    call = ClientCall(TinkerKind.SAVE, "", asked.model_id, asked.seq_id, body)
    return await _of_model(server, key, call)


async def _save_sampler(server: TinkerServer, key: KeySpec, body: bytes) -> Reply:
    asked = decode_body(body, requests.SaveSamplerBody)
    _check_free(server, asked, "sampler_weights")
    call = ClientCall(TinkerKind.SAVE_SAMPLER, "", asked.model_id, asked.seq_id, body)
    return await _of_model(server, key, call)


def _check_free(server: TinkerServer, asked: requests.SaveBody, folder: str) -> None:
    path = f"tinker://{asked.model_id}/{folder}/{asked.path}"
    target = server.book.targets.get(asked.model_id)
    if path in server.book.saved and target is not None and not target.has(asked.seq_id):
        raise invalid(f"expected a name that is not taken, got {asked.path!r}", "path")


async def _load(server: TinkerServer, key: KeySpec, body: bytes) -> Reply:
    asked = decode_body(body, requests.LoadBody)
    _check_base(server, asked.base_model)
    server.book.weights(asked.path, key.tenant, "weights", time.time())
    if asked.model_id is not None:
        call = ClientCall(TinkerKind.LOAD, "", asked.model_id, asked.seq_id, body)
        return await _of_model(server, key, call)
    if asked.session_id is None:
        raise invalid("expected session_id or model_id", "session_id")
    _check_session(server, key, asked.session_id)
    name = model_id(asked.session_id, asked.model_seq_id)
    if name not in server.book.targets:
        _check_new_model(server, key)
    return await _accepted(
        server, key, ClientCall(TinkerKind.LOAD, asked.session_id, name, 0, body)
    )


async def _create_sampler(server: TinkerServer, key: KeySpec, body: bytes) -> Reply:
    asked = decode_body(body, requests.SamplerBody)
    _check_session(server, key, asked.session_id)
    _check_base(server, asked.base_model)
    if asked.model_path is not None:
        server.book.weights(asked.model_path, key.tenant, "sampler_weights", time.time())
    elif asked.base_model is None:
        raise invalid("expected base_model or model_path", "base_model")
    name = sampler_id(asked.session_id, asked.sampling_session_seq_id)
    await server.accept(key, ClientCall(TinkerKind.SAMPLER, asked.session_id, name, 0, body))
    return {"type": "create_sampling_session", "sampling_session_id": name}


async def _join_sampler(server: TinkerServer, key: KeySpec, body: bytes) -> Reply:
    name = decode_body(body, requests.JoinBody).sampling_session_id
    _sampler(server, key, name)
    # Its numbers begin at as many billions: drawn, since a restart would forget a counter.
    counter = secrets.randbits(22) + 1
    return {"type": "join_sampling_session", "client_counter": counter}


def _sampler(server: TinkerServer, key: KeySpec, name: str) -> CallTarget:
    target = server.book.target(name, key.tenant, "sampling_session_id")
    if target.lora is not None:
        raise NoSuchError(f"sampling_session_id: expected a sampler, got the model {name!r}")
    return target


async def _asample(server: TinkerServer, key: KeySpec, body: bytes) -> Reply:
    asked = decode_body(body, requests.SampleBody)
    target = _sampler(server, key, asked.sampling_session_id)
    tokens, context = asked.tokens, server.base.context
    if not 1 <= len(tokens) < context:
        raise invalid(f"expected 1 to {context - 1} tokens, got {len(tokens)}", "prompt")
    if max(tokens) >= server.base.policy.config.vocab_size:
        text = f"expected token ids below {server.base.policy.config.vocab_size}"
        raise invalid(f"{text}, got {max(tokens)}", "prompt")
    longest = min(asked.sampling_params.max_tokens or context, context)
    count = len(tokens) + asked.num_samples * longest
    name, seed = asked.sampling_session_id, asked.sampling_params.seed
    call = ClientCall(TinkerKind.SAMPLE, target.session_id, name, asked.seq_id, body, seed, count)
    reply = await _accepted(server, key, call)
    ids = [f"{reply['request_id']}.{index}" for index in range(asked.num_samples)]
    return reply | {"sample_sequence_ids": ids}


_POST: dict[str, Answer] = {
    "client/config": _client_config,
    "client/dynamic_config": _dynamic_config,
    "telemetry": _nothing,
    "create_session": _create_session,
    "session_heartbeat": _heartbeat,
    "create_model": _create_model,
    "get_info": _get_info,
    "forward_backward": _forward_backward,
    "optim_step": _optim_step,
    "save_weights": _save,
    "save_weights_for_sampler": _save_sampler,
    "load_weights": _load,
    "create_sampling_session": _create_sampler,
    "join_sampling_session": _join_sampler,
    "asample": _asample,
}


async def _post(server: TinkerServer, answer: Answer, request: web.Request) -> web.Response:
    key = server.key_of(request.headers.get("X-API-Key", ""))
    body = await read_whole(server.gateway, request)
    try:
        return web.json_response(await answer(server, key, body))
    except NoSuchError as error:
        raise ApiError(404, "not_found", str(error)) from error


async def _retrieve(server: TinkerServer, request: web.Request) -> web.Response:
    key = server.key_of(request.headers.get("X-API-Key", ""))
    asked = decode_body(await read_whole(server.gateway, request), requests.FutureBody)
    try:
        found = await server.answer(asked.request_id, key.tenant)
    except NoSuchError as error:
        raise ApiError(404, "not_found", str(error), "request_id") from error
    if found is None:
        again = {"type": "try_again", "request_id": asked.request_id, "queue_state": "active"}
        return web.json_response(again)
    answered, body = found
    if answered.error:
        category = "user" if answered.is_refused else "server"
        return web.json_response({"error": answered.error, "category": category})
    is_protobuf = answered.kind in {TinkerKind.FORWARD_BACKWARD, TinkerKind.SAMPLE}
    kind = _PROTOBUF if is_protobuf else "application/json"
    return web.Response(body=body, content_type=kind)


async def _get(server: TinkerServer, request: web.Request) -> web.Response:
    key = server.key_of(request.headers.get("X-API-Key", ""))
    name = request.match_info.get("name", "")
    try:
        if request.path.endswith("/checkpoints"):
            _model(server, key, name)
            return web.json_response({"checkpoints": _checkpoints(server, name)})
        if name:
            path = _sampler(server, key, name).path or None
            reply = {"sampler_id": name, "base_model": server.names[0], "model_path": path}
            return web.json_response(reply)
    except NoSuchError as error:
        raise ApiError(404, "not_found", str(error)) from error
    model = {"model_name": server.names[0], "max_context_length": server.base.context,
             "trainable": True, "sampleable": True}  # fmt: skip
    return web.json_response({"supported_models": [model]})


def _checkpoints(server: TinkerServer, name: str) -> list[Reply]:
    found: list[Reply] = []
    for path, each in server.book.saved.items():
        _, _, model, folder, last = path.split("/")
        if model == name:
            kind = "training" if folder == "weights" else "sampler"
            when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(each.at))
            found.append(
                {
                    "checkpoint_id": f"{folder}/{last}",
                    "checkpoint_type": kind,
                    "time": when,
                    "tinker_path": path,
                    "size_bytes": each.num_bytes,
                }
            )
    return found


async def _healthz(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


def build_app(server: TinkerServer, *middlewares: Middleware) -> web.Application:
    """Return the application of a server; the middlewares run around its own."""
    app = web.Application(
        client_max_size=server.gateway.body_bytes_max,
        middlewares=[*middlewares, answering({})],
    )
    prefix, get = "/api/v1/", partial(_get, server)
    app.add_routes(
        [
            *(web.post(prefix + p, partial(_post, server, each)) for p, each in _POST.items()),
            web.post(prefix + "retrieve_future", partial(_retrieve, server)),
            web.get(prefix + "get_server_capabilities", get),
            web.get(prefix + "samplers/{name}", get),
            web.get(prefix + "training_runs/{name}/checkpoints", get),
            web.get(prefix + "healthz", _healthz),
        ]
    )
    return app
