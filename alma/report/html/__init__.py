"""The report page: one self-contained HTML file, written by `python -m alma.report RUNS --html FILE`."""
