"""Layout of a stream: which dimensions of a value hold the features, the tokens of a sequence, and the sequences.

- `dimensions`: follows the dimensions of a stream through views
- `mixing`: the dimensions along which sublayers combine elements: the tokens
- `token_layout`: the layout of one value, and the order of its tokens; `stream_layout`: those of all values of a stream
"""
