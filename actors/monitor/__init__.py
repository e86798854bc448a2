"""The monitor: folds all streams into one view model, for people and for Prometheus.

```
 all streams ──▶ RunFold (fold.py) ──▶ MonitorState ──▶ live page, report.html, penstock status
                                             ├──▶ exposition() in actor.py ──▶ /metrics
                                             └──▶ infra/run/summary.py ──▶ summary.json
```
`fold.py` dispatches events to `regions.py` and the `*_views.py` modules; `wait_graph.py` explains
stalls. To show another metric, add a field in `state.py`, set it in the handler of its event, and
add it to the page.
"""
