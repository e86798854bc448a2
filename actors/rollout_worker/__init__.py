"""Rollout workers run agent episodes turn by turn, each in its own machine.

`actor.py` takes a command and starts its episodes; `episode.py` runs an episode's turns in a
machine; `conversation.py` keeps the tokens, decides when the episode ends, samples turns and stores
them in the log. `envs/tasks/workspace.py` reads which files an episode changed.

To add a tool, see `envs/harness`. To add an end of an episode, add a member to `EpisodeEnd` and the
rule to `conversation.py` that sets it.
"""
