"""The monitor: folds every stream into one state that people and Prometheus can read.

```
 all streams ──▶ Fold (fold.py) ──▶ MonitorState ──▶ live page, report.html, penstock status
                                        └──▶ exposition.py ──▶ /metrics
```
To show one more thing: a field in `state.py`, its event in `fold.py`, its place on the page.
"""
