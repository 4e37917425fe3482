"""Reports: tables and figures of runs. matplotlib is imported only where a figure is drawn."""
