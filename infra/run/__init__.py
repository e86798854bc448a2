"""`penstock run`: configuration, launcher, processes, progress, and the end of a run.

```
 infra/config ──▶ command.py ──▶ prepare.py, launcher.py
 launcher.py ──▶ one process.py per entry of `[processes]` ──▶ roles.py builds its actors
 closing.py ◀── the log: replay.py, summary.py, report.html
```
`runs.py` is a run's folder and the connection to its log. To add a role: a builder in `roles.py`
with its line in `ROLES`, and its settings as a field of `RunConfig` in `infra/config/settings.py`.
"""
