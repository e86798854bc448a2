"""Rollout workers: whole agent sessions, turn by turn, each in a machine of its own.

`actor.py` takes a command and starts one or several episodes; `episode.py` is the loop of one
episode and runs its turns in a machine; `conversation.py` keeps its tokens, decides when it ends
(pure), samples a turn and stores it in the log. `envs/tasks/workspace.py` reads what an episode
changed.

To add a tool, see `envs/harness`. To add an end of an episode: a member of `EpisodeEnd`, and the
rule in `conversation.py` that sets it.
"""
