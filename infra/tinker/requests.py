"""Bodies of the SDK's JSON requests.

Fields of the SDK's requests that are missing here have no effect and are refused by name.
"""

from typing import Annotated, Any, Literal

import msgspec

from penstock.messages.settings import NonNegativeInt, PositiveInt

_Id = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9:_-]{1,128}\Z")]
_Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{1,128}\Z")]
_Path = Annotated[
    str, msgspec.Meta(pattern=r"^tinker://[A-Za-z0-9:_-]{1,128}/[a-z_]+/[^/]{1,128}\Z")
]
SEQ_MAX = 2**31
"""Numbers of calls are below it."""
_Seq = Annotated[int, msgspec.Meta(ge=0, lt=SEQ_MAX)]
_Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_Ttl = Annotated[int, msgspec.Meta(ge=1, le=3650 * 86_400)]
_Metadata = dict[str, Any] | None
NUM_TAGS_MAX = 64


class _Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: str = ""


class CreateSessionBody(_Body, frozen=True, kw_only=True):
    """`create_session`."""

    tags: Annotated[list[str], msgspec.Meta(max_length=NUM_TAGS_MAX)] = []
    user_metadata: _Metadata = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class HeartbeatBody(_Body, frozen=True, kw_only=True):
    """`session_heartbeat`."""

    session_id: _Id


class LoraBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The adapter of a model."""

    rank: PositiveInt
    seed: _Seed | None = None
    train_unembed: bool = True
    """No effect: the output matrix is not adapted; the session's warning says so."""
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The optimizer's family."""

    type: Literal["adamw"] = "adamw"


class ModelBody(_Body, frozen=True, kw_only=True):
    """`create_model`."""

    session_id: _Id
    model_seq_id: _Seq
    base_model: str
    lora_config: LoraBody
    user_metadata: _Metadata = None
    optimizer_config: OptimizerBody = OptimizerBody()


class LoadBody(_Body, frozen=True, kw_only=True):
    """`load_weights`: into a model, or as the first call of a new one."""

    path: _Path
    optimizer: bool
    model_id: _Id | None = None
    seq_id: _Seq = 0
    session_id: _Id | None = None
    model_seq_id: _Seq = 0
    base_model: str | None = None
    user_metadata: _Metadata = None
    optimizer_config: OptimizerBody | None = None


class ModelIdBody(_Body, frozen=True, kw_only=True):
    """`get_info`."""

    model_id: _Id


class AdamBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """AdamW's settings of one step."""

    learning_rate: Annotated[float, msgspec.Meta(ge=0, le=1e3)] = 1e-4
    beta1: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.95
    eps: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1e-12
    weight_decay: Annotated[float, msgspec.Meta(ge=0, le=1e3)] = 0.0
    grad_clip_norm: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """0 does not clip."""


class StepBody(_Body, frozen=True, kw_only=True):
    """`optim_step`."""

    model_id: _Id
    seq_id: _Seq
    adam_params: AdamBody


class SaveBody(_Body, frozen=True, kw_only=True):
    """`save_weights` and `save_weights_for_sampler`."""

    model_id: _Id
    seq_id: _Seq
    path: _Name | None = None
    ttl_seconds: _Ttl | None = None
    user_metadata: dict[str, str] | None = None


class SaveStateBody(SaveBody, frozen=True, kw_only=True):
    """`save_weights`."""

    overwrite: Literal[False] = False
    """Saved weights are never overwritten: a replay must load what was loaded before."""


class SaveSamplerBody(SaveBody, frozen=True, kw_only=True):
    """`save_weights_for_sampler`."""

    sampling_session_seq_id: _Seq | None = None
    kind: Literal["snapshot"] = "snapshot"


class SamplerBody(_Body, frozen=True, kw_only=True):
    """`create_sampling_session`."""

    session_id: _Id
    sampling_session_seq_id: _Seq
    base_model: str | None = None
    model_path: _Path | None = None


class JoinBody(_Body, frozen=True, kw_only=True):
    """`join_sampling_session`."""

    sampling_session_id: _Id


class ChunkBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tokens of a prompt."""

    tokens: list[NonNegativeInt]
    type: Literal["encoded_text"] = "encoded_text"


class PromptBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prompt."""

    chunks: list[ChunkBody]


class SamplingBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to sample."""

    max_tokens: PositiveInt | None = None
    seed: _Seed | None = None
    stop: str | list[str | int] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=-1, lt=2**31)] = -1
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0


class SampleBody(_Body, frozen=True, kw_only=True):
    """`asample`."""

    prompt: PromptBody
    sampling_params: SamplingBody
    sampling_session_id: _Id
    seq_id: Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
    num_samples: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    prompt_logprobs: bool = False
    topk_prompt_logprobs: Literal[0] = 0
    topk_sample_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] = 0
    prompt_alt_tokens_k: Literal[0] = 0
    record_stability_info: bool = False
    """Has an effect only in stable_reinforce, which is refused."""

    @property
    def tokens(self) -> list[int]:
        """The prompt."""
        return [token for chunk in self.prompt.chunks for token in chunk.tokens]


class FutureBody(_Body, frozen=True, kw_only=True):
    """`retrieve_future`."""

    request_id: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9:_.-]{1,160}\Z")]
    allow_metadata_only: bool = False
