"""hpcrl from Python: what `import hpcrl` offers: plan, train, Run, Generator. The guide is docs/python.md."""
