"""Writes a model as other servers read it, so that all serve the same weights in bf16.

    python -m examples.export_model --output peers-model                 # the default model
    python -m examples.export_model --model-path model.gguf --output peers-model

The folder is one in Hugging Face's layout with a `model-bf16.gguf` beside it. From a GGUF file only.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize
from safetensors.torch import save_file

from srt.executor.weights import iterate_weights
from srt.model_files import locate

_BF16 = gguf.GGMLQuantizationType.BF16


def write_gguf(source: Path, target: Path) -> None:
    """The same metadata; matrices in bf16, vectors in fp32, as llama.cpp's own converter has them."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        element = field.types[1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], element)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim > 1:
            writer.add_tensor(tensor.name, quantize(values, _BF16), raw_dtype=_BF16)
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes a GGUF model as bf16 safetensors and bf16 GGUF.")
    parser.add_argument("--model-path", help="a .gguf file; the default model if unset")
    parser.add_argument("--output", type=Path, required=True, help="folder; made if it is not there")
    args = parser.parse_args()
    files = locate(args.model_path, "auto", None, log=print)
    if files.gguf_path is None:
        parser.error(f"{args.model_path} is no .gguf file: other servers read it as it is")
    args.output.mkdir(parents=True, exist_ok=True)
    for path in {*files.folder.glob("*.json"), files.tokenizer_folder / "tokenizer.json"}:
        shutil.copyfile(path, args.output / path.name)
    stream = iterate_weights(files, torch.bfloat16, progress=True)
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in stream}
    save_file(weights, args.output / "model.safetensors", metadata={"format": "pt"})
    write_gguf(files.gguf_path, args.output / "model-bf16.gguf")


if __name__ == "__main__":
    main()
