"""The figures of the Photon paper's section 4, ours beside them: `python -m benchmarks.figures`."""
