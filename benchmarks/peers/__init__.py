"""Our server and its peers on one machine, under the same load, in one run: see docs/performance.md."""
