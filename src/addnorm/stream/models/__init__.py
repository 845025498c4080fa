"""Models by name, for the command line: a packaged model, a directory, a small transformers model, or a factory.

- `load`: the model and its inputs, by name
- `checkpoint`: directories in Hugging Face's format
- `tiny_model`: transformers model types, built small with random weights
- `inputs`: texts, random inputs, tensors of a file
- `hf`: the exception `ModelLoadError`, and the use of transformers without side effects
"""
