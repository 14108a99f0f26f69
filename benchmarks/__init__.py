"""Benchmarks of rhymerl, a folder a question: `python -m benchmarks.FOLDER.NAME --help`, in a checkout."""
