"""The monitor: folds all streams into one view model that people and Prometheus read.

```
 all streams ──▶ RunFold (fold.py) ──▶ MonitorState ──▶ live page, report.html, penstock status
                                             ├──▶ exposition.py ──▶ /metrics
                                             └──▶ infra/run/summary.py ──▶ summary.json
```
`fold.py` dispatches events to `learning.py`, `regions.py` and `actor_views.py`; `wait_graph.py`
explains stalls. To show one more figure: a field in `state.py`, its event's handler, its place on
the page.
"""
