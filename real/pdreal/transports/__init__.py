"""Transfer engines, which write into the memory of another process and follow one protocol (protocol.py). Also
Mooncake's distributed store, and CUDA streams.
"""
