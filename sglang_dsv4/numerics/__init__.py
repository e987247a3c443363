"""E2M1, E4M3 and E8M0: what the codes mean, and the two conversions made while a checkpoint streams in.

    formats   values of the codes, from the format definitions; the FP4 -> FP8 table (numpy, no torch)
    scales    block scales: E8M0 bytes and their values, block sizes
    fp8       FP8 -> BF16 (`wo_a`)
    fp4       packed FP4 -> FP8 with one power-of-two scale per block (experts)
    backend   numba on the CPU or torch elsewhere, threads, the compile cache

Import the submodules by name: this package imports nothing. None of it imports sglang.
"""
