"""Single episodes for people to read: turns, tool calls, verdicts, and the batch they trained.

```
 RolloutFinished, Verdict, BatchManifest ──▶ EpisodeIndex ──▶ rows: search, filter, a group's rows
 one rollout id ──▶ EpisodeReader ──▶ EpisodeView: turns as text, diff, verdict, its group
```
Everything is read from the log and the object store. `penstock show` and the page render rows and
views; they escape whatever a model or a task wrote, so that it is never interpreted as markup.
"""
