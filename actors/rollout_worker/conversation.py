"""The tokens of one episode, and when it ends. Pure: no I/O.

```
 segment 1   prompt │ turn 0 sampled │ observation │ turn 1 sampled │ observation, request │ summary
             └ context_ids ┘           └ context_ids ┘
 segment 2   prompt, summary │ turn 3 sampled │ observation │ ...
```
What was sampled is never tokenized again: the context of a turn is the concatenation of its
segment. Where the task's limits allow several, a segment is closed once its context fills the
window up to the trigger; turns and tokens are bounded over all of them. Where the task has several
steps, the end of one is a user's message that asks for the next.
"""

from collections.abc import Sequence

import msgspec

from penstock.actors.policy.chat.format import ChatFormat, ChatMessage, OfferedTools, Role
from penstock.actors.policy.chat.summary import NoSummaryError, as_summary, read_summary
from penstock.actors.policy.sampling import SampledTokens, make_turn
from penstock.actors.policy.summaries import SummaryConfig, SummaryMode, restarted
from penstock.envs.harness.tools import functions_of, tools_prompt
from penstock.kernels.arrays import from_array
from penstock.messages.episode import EpisodeSaved
from penstock.messages.rollout import EpisodeEnd, StopReason, Turn
from penstock.messages.task import Sampling, Task


def offered_tools(harness: str) -> OfferedTools:
    """Return the tools of a version of the harness, in both forms that prompts take."""
    return OfferedTools(words=tools_prompt(harness), schemas=functions_of(harness))


class Conversation:
    """One episode from its prompt on.

    Each turn goes through `append`, then, unless that ended the episode or it was a summary,
    `observe`.
    """

    def __init__(
        self,
        chat: ChatFormat,
        task: Task,
        tools: OfferedTools,
        *,
        ends_on_parse_error: bool,
        summary: SummaryConfig | None = None,
    ) -> None:
        """Render the prompt."""
        self.turns: list[Turn] = []
        self.end: EpisodeEnd | None = None
        self.step_ends: list[int] = []
        """The turns that ended a step of the task; another one follows each."""
        self._chat = chat
        self._tools = tools
        self._task = task
        self._limits = task.limits
        self._window = task.limits.window_tokens_max or task.limits.num_tokens_max
        self._ends_on_parse_error = ends_on_parse_error
        self._summary = summary or SummaryConfig()
        self._num_summaries = 0
        self._num_segments = 1
        """Begun, by turns that are appended."""
        self._num_charged = 0
        """Tokens of the appended turns; prompts count once."""
        self._past: list[int] = []
        """Of the segment."""
        self._context = self._prompt("")
        self.starts_segment = False
        """Of the next turn, like the one below."""
        self.is_summary = False
        self._end_without_room()

    @property
    def token_ids(self) -> list[int]:
        """The whole context of the next turn."""
        return self._past + self._context

    @property
    def observation_ids(self) -> list[int]:
        """Tokens since the last turn; the prompt where a segment begins."""
        return self._context

    @property
    def routes_from(self) -> int:
        """First position whose routed experts no earlier turn of the segment has recorded."""
        return max(0, len(self._past) - 1)

    @property
    def num_tokens_next_max(self) -> int:
        """Maximum tokens of the next turn."""
        limits = self._limits
        longest = self._summary.num_tokens_max if self.is_summary else limits.turn_tokens_max
        new = 0 if self.starts_segment else len(self._context)
        left = limits.num_tokens_max - self._num_charged - new
        return min(longest, left, self._window - len(self._past) - len(self._context))

    def make_turn(self, sampled: SampledTokens, sampling: Sampling) -> Turn:
        """Parse what was sampled by `sampling` into the next turn, not yet appended."""
        turn = make_turn(self._chat, self._context, sampled, self._tools, sampling)
        if self.is_summary:
            is_withheld = self._summary.mode is SummaryMode.MASKED
            turn = as_summary(turn, self._fault(turn), is_withheld=is_withheld)
        return msgspec.structs.replace(turn, starts_segment=self.starts_segment)

    def append(self, turn: Turn) -> None:
        """Take a turn, just sampled or stored by an earlier incarnation.

        A stored turn proves that the episode continued, whatever a tool returns when it runs again.
        """
        self._take(turn)
        if turn.is_summary:
            return
        if turn.parse_error and self._ends_on_parse_error:
            self.end = EpisodeEnd.POLICY_ERROR
        elif not turn.parse_error and not turn.calls:
            self._finish([])

    def _take(self, turn: Turn) -> None:
        self.end = None
        self.turns.append(turn)
        if turn.starts_segment:
            self._past = []
            self._num_segments += 1
        context, sampled = from_array(turn.context_ids), from_array(turn.token_ids)
        self._num_charged += sampled.size + (0 if turn.starts_segment else context.size)
        self._past += context.tolist() + sampled.tolist()
        self._context = []
        self.starts_segment = self.is_summary = False
        if turn.is_summary:
            self._take_summary(turn)

    def resume(self, turns: Sequence[Turn], saved: EpisodeSaved) -> None:
        """Take stored turns whose calls have run, and what the last of them left."""
        for turn in turns:
            self._take(turn)
        self.end = None
        self._context = from_array(saved.observation_ids).tolist()
        self.starts_segment, self.is_summary = saved.starts_segment, saved.is_summary
        self.step_ends = list(saved.step_ends)
        if self.starts_segment:
            self._past = []

    def observe(self, results: Sequence[str], *, is_finished: bool) -> None:
        """Take what the last turn's calls returned, or why it does not parse."""
        if is_finished:
            self._finish(results)
        else:
            self._go_on(results)

    def _finish(self, results: Sequence[str]) -> None:
        """Ask for the next step; after the last one the episode is over."""
        if len(self.step_ends) == len(self._task.steps):
            self.end = EpisodeEnd.FINISHED
            return
        self.step_ends.append(len(self.turns) - 1)
        self._go_on(results, self._instruction)

    def _go_on(self, results: Sequence[str], request: str = "") -> None:
        observation = self._observation(results, request)
        self._context = observation or []
        if observation is None:  # Nothing can follow what the policy wrote.
            self.end = EpisodeEnd.POLICY_ERROR
        elif self._has_turn_left():
            if self._is_closing():
                self._close(results)
            self._end_without_room()

    @property
    def _instruction(self) -> str:
        """That of the current step."""
        step = len(self.step_ends)
        return self._task.steps[step - 1].instruction if step else self._task.instruction

    def _observation(self, results: Sequence[str], request: str = "") -> list[int] | None:
        turn = self.turns[-1]
        names = [call.name for call in turn.calls] or [""] * len(results)
        token_ids = from_array(turn.token_ids).tolist()
        return self._chat.render_observation(
            self._past[: -len(token_ids)],
            token_ids,
            list(zip(names, results, strict=True)),
            self._tools,
            request,
        )

    def _is_closing(self) -> bool:
        """Return whether this segment has no further turn but its summary."""
        has_next = self._num_segments < self._limits.num_segments_max
        return has_next and self._summary.is_due(len(self.token_ids), self._window)

    def _close(self, results: Sequence[str]) -> None:
        """Ask for a summary, or begin the next segment without one."""
        if not self._summary.is_asked:
            self._begin("")
            return
        observation = self._observation(results, self._summary.request)
        if observation is None:
            self.end = EpisodeEnd.POLICY_ERROR
        else:
            self._context, self.is_summary = observation, True

    def _take_summary(self, turn: Turn) -> None:
        """Begin the next segment with a summary; one that is none is the policy's failure."""
        self._num_summaries += 1
        if turn.parse_error:
            is_cut = turn.stop_reason is StopReason.LENGTH
            self.end = EpisodeEnd.TOKEN_LIMIT if is_cut else EpisodeEnd.POLICY_ERROR
        elif self._has_turn_left():
            self._begin(self._read(turn))
            self._end_without_room()

    def _begin(self, summary: str) -> None:
        self._past = []
        self._context = self._prompt(summary)
        self.starts_segment = True

    def _prompt(self, summary: str) -> list[int]:
        text = restarted(self._instruction, summary, self._num_summaries)
        message = ChatMessage(role=Role.USER, content=text)
        return self._chat.render_prompt([message], self._tools)

    def _fault(self, turn: Turn) -> str:
        try:
            self._read(turn)
        except NoSummaryError as error:
            return str(error)
        return ""

    def _read(self, turn: Turn) -> str:
        token_ids, context_ids = from_array(turn.token_ids), from_array(turn.context_ids)
        return read_summary(self._chat, token_ids.tolist(), context_ids.tolist(), self._tools)

    def _has_turn_left(self) -> bool:
        """End the episode where its turns are used up."""
        if len(self.turns) < self._limits.num_turns_max:
            return True
        self.end = EpisodeEnd.TURN_LIMIT
        return False

    def _end_without_room(self) -> None:
        if self.end is None and self.num_tokens_next_max < 1:
            self.end = EpisodeEnd.TOKEN_LIMIT
