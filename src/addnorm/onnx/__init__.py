"""Models as ONNX files: `import addnorm.onnx`.

`translations.py` says which ONNX operators each operator of the library becomes, `export.py` writes the file, and `check.py` runs
it in onnxruntime and compares the results with torch's. The packages are an extra: `pip install 'addnorm[onnx]'`.
"""

from addnorm.onnx.check import OnnxMismatchError, check
from addnorm.onnx.export import export
from addnorm.onnx.translations import FORMS, translations

__all__ = ["FORMS", "OnnxMismatchError", "check", "export", "translations"]
