"""Dimensions of values: which dimension of a value is which axis of a stream.

- `dimensions`: follows the dimensions of a value through views, cuts and sums
- `mixing`: the dimensions along which operators combine elements
- `token_layout`: the dimensions of one value as features, tokens and sequences, and the order of its tokens

`find/stream_layout.py` applies them to all values of a stream.
"""
