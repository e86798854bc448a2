"""Single episodes: what the policy read, drew and called, how it was judged, and what trained it.

```
 RolloutFinished, Verdict, BatchManifest ──▶ EpisodeIndex ──▶ rows: search, filter, a group's rows
 one rollout id ──▶ EpisodeReader ──▶ EpisodeView: turns as text, diff, verdict, its group
```
Log and store alone suffice. `penstock show` and the page render both; what a model or a task wrote
is text in them, never markup.
"""
