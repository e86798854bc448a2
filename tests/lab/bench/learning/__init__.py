"""`python -m tests.lab learning`: what training gains, measured over whole runs, in parts of hours.

To add a part: a module with `units()` and `summarize(results)` (`parts.BenchPart`), and its line in
`parts.PARTS`. A unit is minutes of work whose result is one JSON file, so that the bench goes on
where it was stopped; `whole_runs.py` has what units do with runs.
"""
