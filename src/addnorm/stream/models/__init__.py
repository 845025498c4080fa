"""Models by name, for the command line: packaged, from a directory, a transformers type built small, or a factory's.

- `load`: the model and its inputs, by name
- `checkpoint`: directories in Hugging Face's format
- `tiny_model`: transformers model types, built small with random weights
- `inputs`: texts, random inputs, tensors of a file
- `hf`: the error of this folder, and transformers without side effects
"""
