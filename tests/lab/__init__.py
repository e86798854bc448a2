"""The laboratory: programs that measure or simulate Penstock from outside; no run needs them.

`python -m tests.lab` lists them, `python -m tests.lab NAME --help` shows a program's options. Run
it in the repository's root. Every number of SPECIFICATION.md that is not a test's comes from here.

- `age/`: a service of any age: catching up, memory, fates, lineage
- `bench/`: speed as ratios within one run, and what training gains (`bench/learning/`)
- `simulate/`: real actors over modeled hosts and links, at sizes that no test machine has
- `mismatch/`: trainer against sampler where there is no run: fresh weights, expert formats
- `regions/`: a run whose regions are behind emulated links

To add a program: a module with `run(arguments)`, and `add_arguments(parser)` if it takes options;
then its line in `PROGRAMS` in `__main__.py`. `run` returns its figures, which are printed (with
`--json` as one line), or, if it prints them itself, an exit code; it may be a coroutine function.
Modules are imported when they run, so a program may import libraries that others do without.
"""
