"""The tokens of one episode, and when it ends. Pure: no I/O.

```
 prompt │ turn 0 sampled │ observation │ turn 1 sampled │ observation │ ...
 └ context_ids ┘           └ context_ids ┘
```
What was sampled is never tokenized again: the context of a turn is the concatenation.
"""

from collections.abc import Sequence

from penstock.actors.policy.chat.format import ChatFormat, ChatMessage, OfferedTools, Role
from penstock.actors.policy.sampling import SampledTokens, make_turn
from penstock.envs.harness.versions import functions_of, tools_prompt
from penstock.kernels.arrays import from_array
from penstock.messages.base import Array
from penstock.messages.rollout import EpisodeEnd, Turn
from penstock.messages.task import Sampling, Task


def offered_tools(harness: str) -> OfferedTools:
    """Return the tools of a version of the harness, in both forms that prompts take."""
    return OfferedTools(words=tools_prompt(harness), schemas=functions_of(harness))


class Conversation:
    """One episode from its prompt on.

    Each turn goes through `append`, then, unless that ended the episode, `observe`.
    """

    def __init__(
        self, chat: ChatFormat, task: Task, tools: OfferedTools, *, ends_on_parse_error: bool
    ) -> None:
        """Render the prompt."""
        self.turns: list[Turn] = []
        self.end: EpisodeEnd | None = None
        self._chat = chat
        self._tools = tools
        self._limits = task.limits
        self._ends_on_parse_error = ends_on_parse_error
        self._past: list[int] = []
        instruction = ChatMessage(role=Role.USER, content=task.instruction)
        self._context = chat.render_prompt([instruction], tools)
        self._end_without_room()

    @property
    def token_ids(self) -> list[int]:
        """The whole context of the next turn."""
        return self._past + self._context

    @property
    def observation_ids(self) -> list[int]:
        """Tokens since the last turn."""
        return self._context

    @property
    def routes_from(self) -> int:
        """First position whose routed experts no earlier turn has recorded."""
        return max(0, len(self._past) - 1)

    @property
    def num_tokens_next_max(self) -> int:
        """Maximum tokens of the next turn."""
        room = self._limits.num_tokens_max - len(self._past) - len(self._context)
        return min(self._limits.turn_tokens_max, room)

    def make_turn(self, sampled: SampledTokens, sampling: Sampling) -> Turn:
        """Parse what was sampled by `sampling` into the next turn, not yet appended."""
        return make_turn(self._chat, self._context, sampled, self._tools, sampling)

    def append(self, turn: Turn) -> None:
        """Take a turn, just sampled or stored by an earlier incarnation.

        A stored turn proves that the episode continued, whatever a tool returns when it runs again.
        """
        self.end = None
        self.turns.append(turn)
        self._past += from_array(turn.context_ids).tolist() + from_array(turn.token_ids).tolist()
        self._context = []
        if turn.parse_error and self._ends_on_parse_error:
            self.end = EpisodeEnd.POLICY_ERROR
        elif not turn.parse_error and not turn.calls:
            self.end = EpisodeEnd.FINISHED

    def resume(self, turns: Sequence[Turn], observation_ids: Array) -> None:
        """Take stored turns whose calls have run, and what the last of them returned."""
        for turn in turns:
            self.append(turn)
        self.end = None
        self._context = from_array(observation_ids).tolist()

    def observe(self, results: Sequence[str], *, is_finished: bool) -> None:
        """Take what the last turn's calls returned, or why it does not parse."""
        turn = self.turns[-1]
        names = [call.name for call in turn.calls] or [""]
        token_ids = from_array(turn.token_ids).tolist()
        observation = self._chat.render_observation(
            self._past[: -len(token_ids)],
            token_ids,
            list(zip(names, results, strict=True)),
            self._tools,
        )
        self._context = observation or []
        if is_finished:
            self.end = EpisodeEnd.FINISHED
        elif observation is None:  # Nothing can follow what the policy wrote.
            self.end = EpisodeEnd.POLICY_ERROR
        elif len(self.turns) >= self._limits.num_turns_max:
            self.end = EpisodeEnd.TURN_LIMIT
        else:
            self._end_without_room()

    def _end_without_room(self) -> None:
        if self.num_tokens_next_max < 1:
            self.end = EpisodeEnd.TOKEN_LIMIT
