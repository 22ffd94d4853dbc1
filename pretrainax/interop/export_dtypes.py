"""Names the dtypes that exported tensors can have. Imports nothing, so that `huggingface --help` is fast."""

EXPORT_DTYPES = ("float32", "bfloat16", "float16")
